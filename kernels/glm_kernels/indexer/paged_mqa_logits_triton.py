"""Paged index scores in Triton, for GPUs without a kernel of their own and the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_kernels.cache.layout import INDEX_HEAD_DIM, INDEX_PAGE_BYTES, INDEX_SCALE_OFFSET, PAGE_SIZE


@triton.jit
def paged_mqa_logits_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    codes_ptr,
    scales_ptr,
    weights_ptr,
    cache_seqlens_ptr,
    block_table_ptr,
    out_ptr,
    table_stride,
    out_stride,
    NEXT_N: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
) -> None:
    """One program a page and request; the page's keys are loaded once for all tokens."""
    block = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(cache_seqlens_ptr + request)
    if block * PAGE < length:
        page = tl.load(block_table_ptr + request * table_stride + block).to(tl.int64)
        rows = tl.arange(0, PAGE)
        dims = tl.arange(0, HEAD_DIM)
        heads = tl.arange(0, NUM_HEADS)
        keys = tl.load(codes_ptr + page * PAGE_BYTES + rows[:, None] * HEAD_DIM + dims[None, :])
        scale = tl.load(scales_ptr + page * (PAGE_BYTES // 4) + SCALE_OFFSET // 4 + rows)
        position = block * PAGE + rows
        for token in tl.static_range(NEXT_N):
            row = request * NEXT_N + token
            columns = row * NUM_HEADS + heads
            q = tl.load(
                q_ptr + columns[None, :] * HEAD_DIM + dims[:, None]
            )  # [HEAD_DIM, NUM_HEADS]
            weights = tl.load(weights_ptr + columns)
            dots = tl.dot(keys, q)  # [PAGE, NUM_HEADS]
            score = tl.sum(tl.maximum(dots, 0.0) * weights[None, :], axis=1) * scale
            seen = length - NEXT_N + token + 1
            tl.store(out_ptr + row * out_stride + position, score, mask=position < seen)


def paged_mqa_logits_triton(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the scores of every visible position; the rest of ``out`` is left as it is.

    Args:
        q: ``[batch_size, next_n, num_heads, 128]``, e4m3, contiguous.
        index_cache: ``[num_pages, 8448]``, uint8, contiguous.
        weights: ``[batch_size, next_n, num_heads]``, fp32, contiguous.
        cache_seqlens: ``[batch_size]``, int32.
        block_table: ``[batch_size, max_num_blocks]``, int32; rows may be strided.
        out: ``[batch_size * next_n, max_context]``, fp32, written in place.
    """
    batch_size, next_n, num_heads, _ = q.shape
    paged_mqa_logits_kernel[(block_table.shape[1], batch_size)](
        q,
        index_cache.view(torch.float8_e4m3fn),
        index_cache.view(torch.float32),
        weights,
        cache_seqlens,
        block_table,
        out,
        block_table.shape[1],
        out.stride(0),
        NEXT_N=next_n,
        NUM_HEADS=num_heads,
        HEAD_DIM=INDEX_HEAD_DIM,
        PAGE=PAGE_SIZE,
        PAGE_BYTES=INDEX_PAGE_BYTES,
        SCALE_OFFSET=INDEX_SCALE_OFFSET,
    )
