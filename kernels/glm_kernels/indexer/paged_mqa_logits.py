"""Index scores over the paged cache (decode and verify)."""

import torch

from glm_kernels import _arch
from glm_kernels._checks import FLOAT_DTYPES, FP8_DTYPE, INT_DTYPES, Dims, require
from glm_kernels.cache.layout import INDEX_HEAD_DIM, INDEX_PAGE_BYTES, PAGE_SIZE
from glm_kernels.indexer.paged_mqa_logits_sm90 import accepts, paged_mqa_logits_sm90
from glm_kernels.indexer.paged_mqa_logits_torch import paged_mqa_logits_torch


def check_paged_indexer(
    op: str,
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
) -> Dims:
    """Check the arguments that paged scoring and paged selection share; returns the bound sizes."""
    dims = Dims(op)
    heads = ("batch_size", "next_n", "num_heads")
    dims.check("q", q, (*heads, INDEX_HEAD_DIM), (*FLOAT_DTYPES, FP8_DTYPE))
    if index_cache.dtype == torch.uint8:
        dims.check("index_cache", index_cache, ("num_pages", INDEX_PAGE_BYTES), (torch.uint8,))
    else:
        dims.check("index_cache", index_cache, ("num_slots", INDEX_HEAD_DIM), FLOAT_DTYPES)
    dims.check("weights", weights, heads, FLOAT_DTYPES)
    dims.check("cache_seqlens", cache_seqlens, ("batch_size",), INT_DTYPES)
    dims.check("block_table", block_table, ("batch_size", "max_num_blocks"), INT_DTYPES)
    return dims


def paged_mqa_logits(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    max_context: int,
    fill: bool = True,
) -> torch.Tensor:
    """Score the ``next_n`` newest rows of each request against its cached keys.

    ::

        pos    = arange(cache_seqlens[b])
        slot   = block_table[b, pos // 64] * 64 + pos % 64
        logits = einsum("nh,nhl->nl", weights[b], relu(q[b] @ key[slot].T))
        row t of request b sees pos < cache_seqlens[b] - next_n + t + 1

    Args:
        q: ``[batch_size, next_n, num_heads, 128]``, float, or e4m3 with its scale folded into
            ``weights``. ``next_n`` is 1 in decode, 1 + draft tokens in verify.
        index_cache: ``[num_pages, 8448]``, uint8 pages of codes and scales (see ``cache.layout``),
            or ``[num_slots, 128]`` float keys.
        weights: ``[batch_size, next_n, num_heads]``, float. Head weights, constant scales included.
        cache_seqlens: ``[batch_size]``, int32 or int64. Cached length, the new positions included.
        block_table: ``[batch_size, max_num_blocks]``, int32 or int64. Page of each 64 positions;
            entries past a request's length are not read.
        max_context: width of the result, at least every length.
        fill: write ``-inf`` from each row's length on. Without it those entries are unspecified,
            which saves a pass over the result; the selection then needs the lengths.

    Returns:
        ``[batch_size * next_n, max_context]``, fp32; ``-inf`` from each row's length on. A row of
        length <= 0 is all ``-inf`` and reads no page.

    Raises:
        ValueError: on a shape, dtype or device mismatch, or a block table narrower than the
            context.
    """
    op = "paged_mqa_logits"
    dims = check_paged_indexer(op, q, index_cache, weights, cache_seqlens, block_table)
    require(
        op,
        dims["max_num_blocks"] * PAGE_SIZE >= max_context,
        f"block_table covers {dims['max_num_blocks'] * PAGE_SIZE} positions, expected at least "
        f"max_context={max_context}; pass the wider table or lower max_context",
    )
    inputs = (q, index_cache, weights, cache_seqlens, block_table)
    if _arch.has_fp8(q) and accepts(*inputs):
        shape = dims["batch_size"] * dims["next_n"], max_context
        out = torch.empty(shape, device=q.device)
        if fill:
            out.fill_(float("-inf"))
        if dims["batch_size"] == 0:
            return out
        if _arch.use_device_code(op, q):
            paged_mqa_logits_sm90(*inputs, out)
        else:
            from glm_kernels.indexer.paged_mqa_logits_triton import paged_mqa_logits_triton

            paged_mqa_logits_triton(*inputs, out)
        return out
    return paged_mqa_logits_torch(q, index_cache, weights, cache_seqlens, block_table, max_context)
