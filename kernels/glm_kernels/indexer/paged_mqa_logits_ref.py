"""Paged index scores, one request, one draft row and one key at a time."""

import torch


def paged_mqa_logits_ref(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    max_context: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Loop form of ``paged_mqa_logits`` over packed pages.

    Args:
        q: ``[batch_size, next_n, num_heads, 128]``, any float or e4m3.
        index_cache: ``[num_pages, 8448]``, uint8.
        weights: ``[batch_size, next_n, num_heads]``, float.
        cache_seqlens: ``[batch_size]``, int. Length with the ``next_n`` new positions included.
        block_table: ``[batch_size, max_num_blocks]``, int.
        max_context: width of the result.
        dtype: dtype of all arithmetic and of the result.

    Returns:
        ``[batch_size * next_n, max_context]``, ``-inf`` from each row's length on.
    """
    batch_size, next_n = q.shape[:2]
    out = torch.full(
        (batch_size * next_n, max_context), float("-inf"), dtype=dtype, device=q.device
    )
    for request in range(batch_size):
        for row in range(next_n):
            length = int(cache_seqlens[request]) - next_n + row + 1
            for position in range(max(length, 0)):
                page = index_cache[int(block_table[request, position // 64])]
                slot = position % 64
                codes = page[slot * 128 : slot * 128 + 128].clone().view(torch.float8_e4m3fn)
                scale = page[8192 + 4 * slot : 8196 + 4 * slot].clone().view(torch.float32)
                key = codes.to(dtype) * scale.to(dtype)  # [128]
                dots = q[request, row].to(dtype) @ key  # [num_heads]
                score = (weights[request, row].to(dtype) * dots.clamp_min(0)).sum()
                out[request * next_n + row, position] = score
    return out
