"""The kernels measured beside ours. Each is loaded by name when asked for; none is needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from glm_kernels.cache.mla_rows import unpack_mla_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm_kernels.testing.generate import PagedIndexer, SparseMla

# Distribution names, for the versions of a row.
DISTRIBUTIONS = {
    "deep_gemm": "sgl-deep-gemm",
    "flash_mla": "sgl-flash-mla",
    "flash_mla_prefill": "sgl-flash-mla",
    "q8kv8_prefill": "sglang",
    "fast_topk_v2": "sglang-kernel",
    "topk_v2": "sglang",
    "deep_gemm+topk_v2": "sgl-deep-gemm",
    "torch_topk": "torch",
}


def _load(module: str) -> Any:
    return importlib.import_module(module)


def row_lengths(p: PagedIndexer) -> torch.Tensor:
    """Visible length of each row, never negative: ``[batch_size * next_n]``, int32."""
    next_n = p.q.shape[1]
    offset = torch.arange(next_n, device=p.q.device) - next_n + 1
    return (p.cache_seqlens[:, None] + offset).clamp_min(0).flatten().int()


def deep_gemm_logits(p: PagedIndexer) -> Callable[[], torch.Tensor]:
    """DeepGEMM's paged scores, one row a query token, as SGLang calls it on Hopper."""
    deep_gemm = _load("deep_gemm")
    next_n, num_heads = p.q.shape[1:3]
    lengths = row_lengths(p)[:, None].contiguous()
    sms = torch.cuda.get_device_properties(p.q.device).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, sms)
    q = p.q.reshape(-1, 1, num_heads, 128)
    pages = p.index_cache.view(-1, 64, 1, 132)
    weights = p.weights.reshape(-1, num_heads)
    table = p.block_table.repeat_interleave(next_n, 0)
    return lambda: deep_gemm.fp8_paged_mqa_logits(
        q, pages, weights, lengths, table, schedule, p.max_context, clean_logits=False
    )


def topk_v2(logits: torch.Tensor, lengths: torch.Tensor, topk: int) -> Callable[[], torch.Tensor]:
    """SGLang's top-k v2, positions only, its plan made beforehand."""
    module = _load("sglang.kernels.ops.attention.dsv4.topk")
    plan = module.plan_topk_v2(lengths)
    out = torch.empty(logits.shape[0], topk, dtype=torch.int32, device=logits.device)

    def run() -> torch.Tensor:
        module.topk_transform_paged_v2(logits, lengths, None, out, 64, plan)
        return out

    return run


def fast_topk_v2(
    logits: torch.Tensor, lengths: torch.Tensor, topk: int
) -> Callable[[], torch.Tensor]:
    """sglang-kernel's fast_topk_v2."""
    module = _load("sgl_kernel")
    return lambda: module.fast_topk_v2(logits, lengths, topk)


def torch_topk(
    logits: torch.Tensor, lengths: torch.Tensor, topk: int
) -> Callable[[], torch.Tensor]:
    """``torch.topk`` over whole rows."""
    del lengths
    return lambda: logits.topk(topk, dim=1).indices


def flash_mla_decode(x: SparseMla) -> Callable[[], torch.Tensor]:
    """FlashMLA's sparse decode over packed rows; fewer than 64 heads are padded, as SGLang does."""
    flash_mla = _load("flash_mla")
    num_tokens, num_heads, dim = x.q.shape
    q = x.q.new_zeros(num_tokens, 1, 64, dim)
    q[:, 0, :num_heads] = x.q
    schedule, _ = flash_mla.get_mla_metadata()
    cache = x.kv_cache.view(-1, 64, 1, 656)
    indices = x.slots[:, None]
    table = torch.empty(num_tokens, 0, dtype=torch.int32, device=q.device)
    lengths = (x.slots >= 0).sum(1).int()
    return lambda: flash_mla.flash_mla_with_kvcache(
        q,
        cache,
        table,
        lengths,
        512,
        schedule,
        softmax_scale=x.softmax_scale,
        is_fp8_kvcache=True,
        indices=indices,
        use_legacy=True,
        kv_format="V32",
    )[0][:, 0, :num_heads]


def _bf16_rows(x: SparseMla) -> torch.Tensor:
    """Rows of the cache as ``[num_slots, 1, 576]``, bf16."""
    if x.kv_cache.dtype == torch.bfloat16:
        return x.kv_cache
    return unpack_mla_rows(x.kv_cache[:, 0], torch.bfloat16)[:, None]


def flash_mla_prefill(x: SparseMla) -> Callable[[], torch.Tensor]:
    """FlashMLA's sparse prefill over bf16 rows; packed rows are unpacked beforehand."""
    flash_mla = _load("flash_mla")
    rows, indices = _bf16_rows(x), x.slots[:, None]
    return lambda: flash_mla.flash_mla_sparse_fwd(
        x.q, rows, indices, x.softmax_scale, use_legacy=True
    )[0]


def q8kv8_prefill(x: SparseMla) -> Callable[[], torch.Tensor]:
    """SGLang's prefill with e4m3 queries and rows, one scale for each, cast beforehand."""
    module = _load("sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90")
    q, rows = x.q.to(torch.float8_e4m3fn), _bf16_rows(x).to(torch.float8_e4m3fn)
    indices, one = x.slots[:, None], torch.ones((), device=x.q.device)
    return lambda: module.sparse_mla_q8kv8_prefill_fwd(q, rows, indices, x.softmax_scale, one, one)[
        0
    ]
