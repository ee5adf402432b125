"""Time of a step: the roofline of each term, and the same with rates reached by real kernels.

Terms run one after another; nothing overlaps. That makes the sum of rooflines a bound only for
software that does not overlap communication with computation, which is SGLang's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_glm.planning.collectives import Collective
    from sglang_glm.planning.hardware import Gpu
    from sglang_glm.planning.traffic import Term

Bound = Literal["memory", "compute", "link", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTerm:
    """Time of one kind of work and what limits it."""

    name: str
    time_us: float
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Share of the ceilings that kernels reach, and their fixed times.

    `time = fixed + max(bytes / (bandwidth * share), flops / (rate * share))`

    Attributes:
        sparse_attention_share: Of the BF16 rate.
        sparse_attention_min_heads: Heads are padded to this number.
        index_scoring_share: Of the memory bandwidth and of the FP8 rate.
        topk_share: Of the memory bandwidth.
        sparse_attention_us, index_scoring_us, topk_us: Fixed time of one launch.
        other_us_per_layer: Fixed time of all other kernels of a layer.
        other_us_per_pass: Fixed time of a forward pass: graph launch, sampling, scheduling.
    """

    sparse_attention_share: float = 1.0
    sparse_attention_min_heads: int = 1
    index_scoring_share: float = 1.0
    topk_share: float = 1.0
    sparse_attention_us: float = 0.0
    index_scoring_us: float = 0.0
    topk_us: float = 0.0
    other_us_per_layer: float = 0.0
    other_us_per_pass: float = 0.0


FIXED_TERM = "small kernels and step"

IDEAL_RATES = KernelRates()
"""The roofline itself."""

HOPPER_RATES = KernelRates(
    sparse_attention_share=0.39,
    sparse_attention_min_heads=64,
    index_scoring_share=0.95,
    topk_share=0.37,
    sparse_attention_us=17.0,
    index_scoring_us=3.5,
    topk_us=8.0,
    other_us_per_layer=73.0,
    other_us_per_pass=170.0,
)
"""Kernels of SGLang 0.5.23 on an H200.

The first seven are fitted to launches of FlashMLA (FP8 rows, top-k 2048), DeepGEMM's paged index
scores and SGLang's top-k v2; `tests/unit/planning/test_roofline.py` holds those measurements.
The last two are fitted to the decode step and the MTP round of one row of a 7-layer server
(context 1,000, one request), see docs/planning.md.
"""


def known_rates(gpu: Gpu) -> KernelRates | None:
    """Kernel rates for a GPU, `None` where no kernel was measured on its architecture."""
    return HOPPER_RATES if gpu.architecture == "hopper" else None


def roofline_us(hbm_bytes: float, flops: float, math: str, gpu: Gpu) -> tuple[float, Bound]:
    """Lower bound of one term and what sets it."""
    memory_us = 1e6 * hbm_bytes / gpu.hbm_bytes_per_s
    rates = {"bf16": gpu.bf16_flops_per_s, "fp8": gpu.fp8_flops_per_s}
    compute_us = 1e6 * flops / rates[math] if math in rates else 0.0
    return (memory_us, "memory") if memory_us >= compute_us else (compute_us, "compute")


def time_term(term: Term, gpu: Gpu, rates: KernelRates, *, local_heads: int) -> TimedTerm:
    """Time of one term.

    Args:
        term: The work.
        gpu: Ceilings.
        rates: `IDEAL_RATES` for the roofline.
        local_heads: Query heads of this GPU, for kernels that pad them.
    """
    hbm_bytes, flops = term.hbm_bytes, term.flops
    fixed_us = 0.0
    if term.name == "sparse attention":
        padding = max(1.0, rates.sparse_attention_min_heads / local_heads)
        flops *= padding / rates.sparse_attention_share
        fixed_us = rates.sparse_attention_us
    elif term.name == "index scoring":
        hbm_bytes /= rates.index_scoring_share
        flops /= rates.index_scoring_share
        fixed_us = rates.index_scoring_us
    elif term.name == "top-k selection":
        hbm_bytes /= rates.topk_share
        fixed_us = rates.topk_us
    variable_us, bound = roofline_us(hbm_bytes, flops, term.math, gpu)
    fixed_us *= term.launches
    if fixed_us > variable_us:
        bound = "fixed"
    return TimedTerm(name=term.name, time_us=fixed_us + variable_us, bound=bound)


def time_step(
    terms: Iterable[Term],
    collectives: Iterable[Collective],
    gpu: Gpu,
    rates: KernelRates,
    *,
    local_heads: int,
    num_layers: int,
    gpus_per_node: int,
) -> list[TimedTerm]:
    """Times of all terms of a step, collectives and the fixed time of small kernels included."""
    timed = [time_term(term, gpu, rates, local_heads=local_heads) for term in terms]
    for collective in collectives:
        on_link = collective.transfer_us(gpu, gpus_per_node) >= collective.start_up_us
        timed.append(
            TimedTerm(
                name=collective.name,
                time_us=collective.time_us(gpu, gpus_per_node),
                bound="link" if on_link else "fixed",
            )
        )
    fixed_us = rates.other_us_per_pass + rates.other_us_per_layer * num_layers
    if fixed_us:
        timed.append(TimedTerm(name=FIXED_TERM, time_us=fixed_us, bound="fixed"))
    return timed


def total_us(timed: Iterable[TimedTerm]) -> float:
    """Time of a step."""
    return sum(term.time_us for term in timed)


def slowest(timed: Iterable[TimedTerm]) -> TimedTerm:
    """The term that takes longest: what bounds the step."""
    return max(timed, key=lambda term: term.time_us)
