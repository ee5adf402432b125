"""What fits on one GPU: weights, reserve, and how many requests the rest holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_glm.planning import kv_cache, weights

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.hardware import Gpu
    from sglang_glm.planning.kv_cache import KvDtype
    from sglang_glm.planning.layout import ParallelLayout
    from sglang_glm.planning.weights import Precision, WeightGroup

_MIB = 2**20

DRIVER_BYTES = 2**30
"""CUDA context, NCCL and library handles: taken before SGLang measures free memory. Assumed."""

INDEX_SCORE_BYTES = 4
INDEX_SCORE_ROW_ALIGN = 256
PREFILL_SCORE_SHARE = 0.2
"""Default of `SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION`."""


def index_score_bytes(num_rows: float, num_keys: int) -> float:
    """FP32 index scores of one layer, rows padded to 256 columns as DeepGEMM pads them."""
    columns = math.ceil(num_keys / INDEX_SCORE_ROW_ALIGN) * INDEX_SCORE_ROW_ALIGN
    return num_rows * columns * INDEX_SCORE_BYTES


def logits_bytes(config: GlmDsaConfig, num_rows: float) -> float:
    """LM-head output: the gathered BF16 logits and their FP32 copy for sampling."""
    return num_rows * config.vocab_size * (2 + 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveInputs:
    """Server settings that decide what must stay free beside weights and cache.

    Attributes:
        chunk_tokens: `--chunked-prefill-size`, over all attention groups.
        max_graph_batch: Largest captured decode batch of one attention group.
    """

    chunk_tokens: int
    max_graph_batch: int


def reserve_bytes_by_part(
    layout: ParallelLayout, gpu: Gpu, inputs: ReserveInputs
) -> dict[str, float]:
    """Memory outside weights and cache, by the rule SGLang 0.5.23 sets `mem_fraction_static` by.

    Source: `arg_groups/memory_hook.handle_gpu_memory_settings` for an MLA model: 512 MiB of
    metadata, 1.5 MiB a prefill token, 1 GiB per 8 GPUs of tensor parallelism, 2 MiB a captured
    request, 1.5 GiB for prefill graphs; attention DP adds 3 MiB (4.5 above 300) a captured
    request and group; never below 10 GiB on GPUs above 60 GiB; DeepEP adds 2 GiB.
    """
    parts = {
        "metadata": 512.0,
        "activations": 1.5 * max(inputs.chunk_tokens, 2048),
        "communication": 1024.0 * layout.tp_size / 8,
        "graphs": 2.0 * inputs.max_graph_batch + 1.5 * 1024,
    }
    if layout.attn_dp_size > 1:
        per_request = 4.5 if inputs.max_graph_batch > 300 else 3.0
        parts["graphs"] += per_request * inputs.max_graph_batch * layout.attn_dp_size
    if gpu.memory_bytes > 60 * 1024 * _MIB:
        parts["margin"] = max(0.0, 10 * 1024 - sum(parts.values()))
    if layout.moe_dispatch == "all_to_all":
        parts["all-to-all buffers"] = 2 * 1024.0
    return {name: size * _MIB for name, size in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One GPU, byte by byte.

    Attributes:
        weights: Loaded weights by group.
        absorbed_bytes: BF16 copies of `kv_b_proj`.
        driver_bytes: Before SGLang measures.
        reserve: Outside weights and cache, by part.
        kv_pool_bytes: What is left for the cache.
        kv_bytes_per_token: Cost of one cached token on this GPU.
        tokens_per_group: Tokens that one attention group can cache, whole pages.
        num_groups: Attention groups of the replica.
        mem_fraction_static: `--mem-fraction-static` that leaves exactly the reserve.
    """

    gpu_bytes: int
    weights: dict[WeightGroup, int]
    absorbed_bytes: int
    driver_bytes: int
    reserve: dict[str, float]
    kv_pool_bytes: float
    kv_bytes_per_token: float
    tokens_per_group: int
    num_groups: int
    mem_fraction_static: float

    @property
    def weights_bytes(self) -> int:
        """Weights and absorbed copies."""
        return sum(self.weights.values()) + self.absorbed_bytes

    @property
    def reserve_bytes(self) -> float:
        """All that stays free of weights and cache, the driver's share not counted."""
        return sum(self.reserve.values())

    def requests_that_fit(self, context_tokens: int, *, overhang_tokens: int = 0) -> int:
        """Requests of one length that the replica can hold at once.

        Args:
            context_tokens: Prompt and answer.
            overhang_tokens: Draft rows written beyond the accepted tokens.

        Returns:
            Whole requests, each in whole pages of 64 tokens and within one attention group.
        """
        page = kv_cache.PAGE_SIZE
        per_request = math.ceil((context_tokens + overhang_tokens) / page) * page
        return self.tokens_per_group // per_request * self.num_groups


def plan_memory(
    config: GlmDsaConfig,
    layout: ParallelLayout,
    gpu: Gpu,
    *,
    precision: Precision,
    kv_dtype: KvDtype,
    with_mtp: bool,
    reserve: ReserveInputs,
) -> MemoryPlan:
    """Divide one GPU's memory.

    Raises:
        ValueError: If weights and reserve leave no room for one page of cache.
    """
    by_group = weights.weight_bytes_per_gpu(config, layout, precision, with_mtp=with_mtp)
    absorbed = weights.absorbed_bytes_per_gpu(config, layout, with_mtp=with_mtp)
    parts = reserve_bytes_by_part(layout, gpu, reserve)
    available = gpu.memory_bytes - DRIVER_BYTES
    pool = available - sum(by_group.values()) - absorbed - sum(parts.values())
    per_token = kv_cache.kv_bytes_per_token_per_gpu(config, layout, kv_dtype, with_mtp=with_mtp)
    # Page 0 is reserved for padded rows.
    page_bytes = kv_cache.PAGE_SIZE * per_token
    pages = math.floor(pool / page_bytes) - 1
    if pages < 1:
        needed = sum(by_group.values()) + absorbed
        smaller = " or FP8 weights" if precision == "bf16" else ""
        raise ValueError(
            f"plan: the weights need {needed / 1e9:.1f} GB on each of {layout.tp_size} GPUs and "
            f"{sum(parts.values()) / 1e9:.1f} GB must stay free, but {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:.1f} GB; use more GPUs{smaller}"
        )
    return MemoryPlan(
        gpu_bytes=gpu.memory_bytes,
        weights=by_group,
        absorbed_bytes=absorbed,
        driver_bytes=DRIVER_BYTES,
        reserve=parts,
        kv_pool_bytes=pool,
        kv_bytes_per_token=per_token,
        tokens_per_group=pages * kv_cache.PAGE_SIZE,
        num_groups=layout.attn_dp_size,
        mem_fraction_static=math.floor(1000 * (1 - sum(parts.values()) / available)) / 1000,
    )
