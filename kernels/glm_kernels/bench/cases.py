"""What is measured: for each op its inputs, our call, the peers' and the gate before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_verify import sparse_mla_verify
from glm_kernels.attention.union_slots import union_slots
from glm_kernels.attention.union_slots_ref import union_slots_ref
from glm_kernels.bench import peers
from glm_kernels.indexer.paged_mqa_logits import paged_mqa_logits
from glm_kernels.indexer.paged_mqa_topk import paged_mqa_topk
from glm_kernels.indexer.topk_indices import topk_indices
from glm_kernels.testing import shapes
from glm_kernels.testing.fp64 import paged_logits_fp64, sparse_mla_fp64
from glm_kernels.testing.generate import PagedIndexer, SparseMla, paged_indexer, sparse_mla_inputs
from glm_kernels.testing.numeric import calc_diff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Measured ceilings of an H200: copy bandwidth and dense matrix rates on random data.
BYTES_PER_US = 4.27e6
FP8_FLOPS_PER_US = 1580e6
BF16_FLOPS_PER_US = 790e6
ROW_BYTES = {True: 656, False: 1152}


@dataclass(slots=True, kw_only=True)
class Case:
    """One row of a table. ``error`` runs the gate and returns the error it measured."""

    op: str
    shape: str
    dtype: str
    run: Callable[[], torch.Tensor]
    error: Callable[[], float]
    peers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = field(default_factory=dict)
    bytes_moved: int
    flops: int
    flops_per_us: float

    @property
    def floor_us(self) -> float:
        """Least time at the measured ceilings."""
        return max(self.bytes_moved / BYTES_PER_US, self.flops / self.flops_per_us)


def _indexer_cost(p: PagedIndexer) -> tuple[int, int]:
    """Bytes of the keys read once, and floating-point operations of the scores."""
    positions = int(p.cache_seqlens.clamp_min(0).sum())
    next_n, num_heads = p.q.shape[1:3]
    return positions * 132, positions * next_n * num_heads * 256


def _logits_error(p: PagedIndexer, logits: torch.Tensor) -> float:
    """Error of the first request's first 16,384 positions against fp64; raises above the budget."""
    length = min(16_384, int(p.cache_seqlens[0]))
    part = PagedIndexer(
        q=p.q[:1],
        index_cache=p.index_cache,
        weights=p.weights[:1],
        cache_seqlens=torch.full_like(p.cache_seqlens[:1], length),
        block_table=p.block_table[:1],
        max_context=length,
    )
    want = paged_logits_fp64(part)
    visible = want > float("-inf")
    error = calc_diff(logits[: want.shape[0], :length][visible], want[visible])
    if not error <= 5e-6:
        raise RuntimeError(f"bench: scores differ from fp64 by {error:.2e}, budget 5e-6")
    return error


def _exact(got: torch.Tensor, logits: torch.Tensor, p: PagedIndexer, topk: int) -> float:
    """0 when the first and the last row are those of a stable sort; raises otherwise."""
    lengths = peers.row_lengths(p)
    for row in (0, logits.shape[0] - 1):
        order = logits[row, : int(lengths[row])].sort(descending=True, stable=True).indices[:topk]
        if not torch.equal(got[row, : order.numel()].long(), order):
            raise RuntimeError(f"bench: row {row} of the selection is not that of a stable sort")
    return 0.0


def _indexer_shape(shape: shapes.IndexerShape) -> Iterator[Case]:
    p = paged_indexer(shape, 0, "cuda")
    args = (p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table)
    lengths, topk = peers.row_lengths(p), shape.topk
    moved, flops = _indexer_cost(p)
    rows = lengths.numel()
    logits = paged_mqa_logits(*args, p.max_context)
    logits_bytes = 4 * int(lengths.sum())
    yield Case(
        op="paged_mqa_logits",
        dtype="e4m3",
        run=lambda: paged_mqa_logits(*args, p.max_context, fill=False),
        error=lambda: _logits_error(p, logits),
        peers={"deep_gemm": lambda: peers.deep_gemm_logits(p)},
        bytes_moved=moved + logits_bytes,
        shape=shape.name,
        flops=flops,
        flops_per_us=FP8_FLOPS_PER_US,
    )
    ke = lengths
    yield Case(
        op="topk_indices",
        shape=shape.name,
        dtype="fp32",
        run=lambda: topk_indices(logits, topk, None, ke),
        error=lambda: _exact(topk_indices(logits, topk, None, ke), logits, p, topk),
        peers={
            "topk_v2": lambda: peers.topk_v2(logits, ke, topk),
            "fast_topk_v2": lambda: peers.fast_topk_v2(logits, ke, topk),
            "torch_topk": lambda: peers.torch_topk(logits, ke, topk),
        },
        bytes_moved=logits_bytes + rows * topk * 4,
        flops=0,
        flops_per_us=FP8_FLOPS_PER_US,
    )

    def both() -> Callable[[], torch.Tensor]:
        score = peers.deep_gemm_logits(p)
        select = peers.topk_v2(score(), ke, topk)
        # The selection of a fixed matrix: its time does not depend on which one it reads.
        return lambda: (score(), select())[1]

    yield Case(
        op="paged_mqa_topk",
        dtype="e4m3",
        run=lambda: paged_mqa_topk(*args, topk),
        error=lambda: _exact(paged_mqa_topk(*args, topk), logits, p, topk),
        peers={"deep_gemm+topk_v2": both},
        bytes_moved=moved + rows * topk * 4,
        shape=shape.name,
        flops=flops,
        flops_per_us=FP8_FLOPS_PER_US,
    )


def indexer_cases() -> Iterator[Case]:
    """Scoring, selection, and both together."""
    for shape in shapes.BENCH_INDEXER:
        yield from _indexer_shape(shape)
        torch.cuda.empty_cache()


def _attention_error(x: SparseMla, out: torch.Tensor) -> float:
    """Error of the first tokens against fp64; raises above the budget."""
    count = min(4, x.q.shape[0])
    part = SparseMla(
        q=x.q[:count], kv_cache=x.kv_cache, slots=x.slots[:count], softmax_scale=x.softmax_scale
    )
    error = calc_diff(out[:count], sparse_mla_fp64(part)[0])
    if not error <= 1e-5:
        raise RuntimeError(f"bench: attention differs from fp64 by {error:.2e}, budget 1e-5")
    return error


def _mla_case(shape: shapes.MlaShape, packed: bool, op: str) -> Case:
    union = 4096 if shape.shared > 1 else None
    x = sparse_mla_inputs(shape, packed, 0, "cuda", torch.bfloat16, union=union)
    rows = shape.num_tokens * shape.topk
    if union is not None:
        rows = shape.num_tokens // shape.shared * union
    run = lambda: sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)[0]
    if op == "sparse_mla_verify":
        plan = union_slots(x.slots, shape.shared)
        run = lambda: sparse_mla_verify(x.q, x.kv_cache, *plan, x.softmax_scale, union)[0]
    chosen: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {}
    if packed:
        chosen["flash_mla"] = lambda: peers.flash_mla_decode(x)
    if shape.num_heads == 64 and (shape in shapes.PREFILL_MLA or not packed):
        chosen["flash_mla_prefill"] = lambda: peers.flash_mla_prefill(x)
    if shape in shapes.PREFILL_MLA:
        chosen["q8kv8_prefill"] = lambda: peers.q8kv8_prefill(x)
    queries = x.q.numel() * 2 + shape.num_tokens * shape.num_heads * 512 * 2
    return Case(
        op=op,
        shape=shape.name,
        dtype="packed" if packed else "bf16",
        run=run,
        error=lambda: _attention_error(x, run()),
        peers=chosen,
        bytes_moved=min(rows, shape.num_slots) * ROW_BYTES[packed] + queries,
        flops=shape.num_tokens * shape.topk * shape.num_heads * 2 * (576 + 512),
        flops_per_us=BF16_FLOPS_PER_US,
    )


def _union_case(shape: shapes.MlaShape) -> Case:
    slots = sparse_mla_inputs(shape, True, 0, "cuda", torch.bfloat16, union=4096).slots

    def error() -> float:
        got, want = union_slots(slots, shape.shared), union_slots_ref(slots.cpu(), shape.shared)
        count = int(want[2][0])
        if not torch.equal(got[0][0, :count].cpu(), want[0][0, :count]):
            raise RuntimeError("bench: the union of the first request is not that of its sets")
        return 0.0

    return Case(
        op="union_slots",
        shape=shape.name,
        dtype="int32",
        run=lambda: union_slots(slots, shape.shared)[0],
        error=error,
        bytes_moved=slots.numel() * 9,
        flops=0,
        flops_per_us=BF16_FLOPS_PER_US,
    )


def attention_cases() -> Iterator[Case]:
    """Sparse MLA decode, verify and prefill."""
    for shape in shapes.BENCH_MLA:
        for packed in (True, False):
            yield _mla_case(shape, packed, "sparse_mla")
    yield _mla_case(shapes.VERIFY_MLA[0], True, "sparse_mla_verify")
    yield _union_case(shapes.VERIFY_MLA[0])
    for shape in shapes.PREFILL_MLA:
        for packed in (False, True):
            yield _mla_case(shape, packed, "sparse_mla")


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "indexer": indexer_cases,
    "attention": attention_cases,
}
