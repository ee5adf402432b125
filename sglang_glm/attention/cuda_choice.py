"""Which kernels serve a phase on CUDA where no flag names one: a table of measurements.

Ours are chosen where they were measured to be faster than SGLang's on the same device, and where
nothing was measured SGLang's stay. The figures are rows of `docs/bench/`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from glm_kernels.attention.sparse_mla_sm90 import MAX_ROWS as MAX_TILE_ROWS
from glm_kernels.attention.union_slots import MAX_TOKENS as MAX_SHARED_TOKENS
from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.paged_mqa_logits_sm90 import MAX_NEXT_N
from glm_kernels.indexer.paged_mqa_logits_sm90 import NUM_HEADS as INDEX_HEADS
from glm_kernels.indexer.topk_indices_sm90 import MAX_TOPK as MAX_INDEX_TOPK

Phase = Literal["decode", "verify", "prefill"]
#: "stock" is whatever SGLang would run; "glm_sparse" gathers for each row; "glm_verify" gathers the
#: union of a request's rows once.
Form = Literal["stock", "glm_sparse", "glm_verify"]

#: Compute capability that the measured kernels are built for.
CAPABILITY = (9, 0)
#: Fewest requests for which the plan of a shared gather costs less than the gather saves.
MIN_SHARED_REQUESTS = 16

FP8, BF16 = "float8_e4m3fn", "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """One attention call.

    Attributes:
        phase: "verify" includes the draft model's extend: several rows a request.
        num_heads: Query heads of this rank.
        batch_size: Requests.
        next_n: Rows a request.
        kv_dtype: KV cache dtype, by torch's name.
        peer: SGLang's implementation of this phase, by its flag's name.
        capability: Compute capability.
        page_size: Slots a page.
    """

    phase: Phase
    num_heads: int
    batch_size: int
    next_n: int
    kv_dtype: str
    peer: str
    capability: tuple[int, int] = CAPABILITY
    page_size: int = PAGE_SIZE

    @property
    def rows(self) -> int:
        """Query tokens of the call."""
        return self.batch_size * self.next_n


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What serves, and why."""

    form: Form
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    form: Form
    phases: tuple[Phase, ...]
    kv_dtype: str
    peer: str
    max_heads: int
    rows: tuple[int, int]
    ratio: str
    min_requests: int = 1

    def covers(self, work: AttentionWork) -> bool:
        return (
            work.phase in self.phases
            and work.kv_dtype == self.kv_dtype
            and work.peer == self.peer
            and work.num_heads <= self.max_heads
            and self.rows[0] <= work.rows <= self.rows[1]
            and work.batch_size >= self.min_requests
            and (self.form != "glm_verify" or fits_shared_gather(work.num_heads, work.next_n))
        )


#: First match wins. `ratio` is our time over the peer's, on one H200.
_MEASURED: tuple[_Measured, ...] = (
    # 8 heads, 32 requests of 6: 0.29, and a plan of 60 us that the layers of a selection share.
    _Measured(
        form="glm_verify",
        phases=("verify",),
        kv_dtype=FP8,
        peer="flashmla_kv",
        max_heads=32,
        rows=(1, 4096),
        min_requests=MIN_SHARED_REQUESTS,
        ratio="0.29 beside a plan shared by layers, 8 heads, 32 x 6",
    ),
    # FlashMLA pads eight heads to 64.
    _Measured(
        form="glm_sparse",
        phases=("decode", "verify"),
        kv_dtype=FP8,
        peer="flashmla_kv",
        max_heads=8,
        rows=(1, 192),
        ratio="0.71, 0.64 and 0.54 with 1, 32 and 192 rows of 8 heads",
    ),
    _Measured(
        form="glm_sparse",
        phases=("decode", "verify"),
        kv_dtype=FP8,
        peer="flashmla_kv",
        max_heads=64,
        rows=(1, 192),
        ratio="0.68, 0.79, 0.70 and 0.81 with 1, 8, 32 and 192 rows of 64 heads",
    ),
    # The peer is a prefill kernel: it does not divide the selection of a row.
    _Measured(
        form="glm_sparse",
        phases=("decode", "verify"),
        kv_dtype=BF16,
        peer="flashmla_sparse",
        max_heads=64,
        rows=(1, 32),
        ratio="0.21, 0.28 and 0.57 with 1, 8 and 32 rows of 64 heads",
    ),
)

#: Fewest requests with which scoring and selection of verify rows beat DeepGEMM and top-k v2 at
#: 32,768 positions and above: 0.50 (32 x 32,768), 0.46 (8 x 131,072), 0.35 (32 x 131,072).
MIN_VERIFY_REQUESTS = 4


@functools.lru_cache(maxsize=4096)
def choose_attention(work: AttentionWork) -> Choice:
    """The form for one attention call, when no flag names it.

    Args:
        work: The call.

    Returns:
        The form and the measurement or the lack of one that decided.
    """
    obstacle = impossible(
        num_heads=work.num_heads, capability=work.capability, page_size=work.page_size
    )
    if obstacle is not None:
        return Choice(form="stock", reason=obstacle)
    for row in _MEASURED:
        if row.covers(work):
            return Choice(form=row.form, reason=f"{row.ratio} of {row.peer}")
    return Choice(form="stock", reason=f"ours was not measured to be faster than {work.peer} here")


def named_form(work: AttentionWork) -> Form:
    """The form behind the flag value "glm_sparse": ours always, with one gather where it fits."""
    shared = (
        work.phase == "verify"
        and work.batch_size >= MIN_SHARED_REQUESTS
        and fits_shared_gather(work.num_heads, work.next_n)
    )
    return "glm_verify" if shared else "glm_sparse"


def fits_shared_gather(num_heads: int, next_n: int) -> bool:
    """Whether a request's `next_n` rows can attend from one gather: one tile holds all their heads."""
    return 1 < next_n <= MAX_SHARED_TOKENS and num_heads * next_n <= MAX_TILE_ROWS


def wins_anywhere(*, num_heads: int, kv_dtype: str, peer: str, capability: tuple[int, int]) -> bool:
    """Whether any decode or verify batch of this rank would get one of our forms."""
    return impossible(num_heads=num_heads, capability=capability) is None and any(
        row.kv_dtype == kv_dtype and row.peer == peer and num_heads <= row.max_heads
        for row in _MEASURED
    )


def choose_verify_selection(
    *,
    batch_size: int,
    next_n: int,
    index_heads: int,
    index_topk: int,
    capability: tuple[int, int] = CAPABILITY,
    page_size: int = PAGE_SIZE,
    named: bool = False,
) -> Choice:
    """Whether the rows of a verify or draft-extend batch are scored and selected by our kernel.

    Args:
        batch_size: Requests.
        next_n: Rows a request.
        index_heads: Heads of the indexer.
        index_topk: Positions to select.
        capability: Compute capability.
        page_size: Slots a page.
        named: A flag asks for our selection, so batches that gain nothing take it too.

    Returns:
        "glm_verify" or "stock", with the reason.
    """
    obstacle = impossible(num_heads=1, capability=capability, page_size=page_size)
    if obstacle is None and index_heads not in INDEX_HEADS:
        obstacle = f"the scoring kernel knows {INDEX_HEADS} index heads, not {index_heads}"
    if obstacle is None and not 2 <= next_n <= MAX_NEXT_N:
        obstacle = (
            f"{next_n} rows a request; the scoring kernel shares keys among 2 to {MAX_NEXT_N}"
        )
    if obstacle is None and index_topk > MAX_INDEX_TOPK:
        obstacle = f"index_topk {index_topk} exceeds {MAX_INDEX_TOPK}"
    if obstacle is None and not named and batch_size < MIN_VERIFY_REQUESTS:
        obstacle = f"fewer than {MIN_VERIFY_REQUESTS} requests gain nothing"
    if obstacle is not None:
        return Choice(form="stock", reason=obstacle)
    return Choice(form="glm_verify", reason="0.35 to 0.50 of DeepGEMM and top-k v2")


def impossible(
    *, num_heads: int, capability: tuple[int, int], page_size: int = PAGE_SIZE
) -> str | None:
    """Why our kernels cannot serve here at all, or None."""
    if capability != CAPABILITY:
        return (
            f"our kernels need compute capability {_dotted(CAPABILITY)}, got {_dotted(capability)}"
        )
    if page_size != PAGE_SIZE:
        return f"our kernels address pages of {PAGE_SIZE} slots, got {page_size}"
    if num_heads > MAX_TILE_ROWS:
        return (
            f"our kernels take up to {MAX_TILE_ROWS} query heads a rank, got {num_heads}; "
            "raise the tensor-parallel size"
        )
    return None


def describe(
    *, num_heads: int, kv_dtype: str, peer: str, capability: tuple[int, int]
) -> list[tuple[str, Choice]]:
    """The decision for some usual batches, for logs and the doctor.

    Returns:
        Pairs of a batch in words and the choice for it.
    """
    batches: tuple[tuple[Phase, int, int], ...] = (
        ("decode", 1, 1),
        ("decode", 16, 1),
        ("decode", 32, 1),
        ("verify", 1, 6),
        ("verify", 16, 6),
        ("verify", 32, 6),
    )
    described = []
    for phase, batch_size, next_n in batches:
        work = AttentionWork(
            phase=phase,
            num_heads=num_heads,
            batch_size=batch_size,
            next_n=next_n,
            kv_dtype=kv_dtype,
            peer=peer,
            capability=capability,
        )
        described.append((f"{phase} {batch_size} x {next_n}", choose_attention(work)))
    return described


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
