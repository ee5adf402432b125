"""Score and select over the paged cache (decode and verify) without the logits matrix."""

import torch

from glm_kernels import _arch
from glm_kernels._checks import require
from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.paged_mqa_logits import check_paged_indexer
from glm_kernels.indexer.paged_mqa_logits_sm90 import accepts
from glm_kernels.indexer.paged_mqa_logits_torch import paged_mqa_logits_torch
from glm_kernels.indexer.paged_mqa_topk_sm90 import paged_mqa_topk_sm90
from glm_kernels.indexer.topk_indices import positions_to_slots
from glm_kernels.indexer.topk_indices_sm90 import MAX_TOPK
from glm_kernels.indexer.topk_indices_torch import topk_indices_torch


def paged_mqa_topk(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    return_slots: bool = False,
) -> torch.Tensor:
    """Select the ``topk`` best cached positions for the ``next_n`` newest rows of each request.

    ::

        logits = paged_mqa_logits(q, index_cache, weights, cache_seqlens, block_table, width)
        topk_indices(logits, topk)

    Args:
        q: ``[batch_size, next_n, num_heads, 128]``, float, or e4m3 with its scale folded into
            ``weights``.
        index_cache: ``[num_pages, 8448]`` uint8 pages, or ``[num_slots, 128]`` float keys.
        weights: ``[batch_size, next_n, num_heads]``, float.
        cache_seqlens: ``[batch_size]``, int32 or int64. Cached length, the new positions included.
        block_table: ``[batch_size, max_num_blocks]``, int32 or int64.
        topk: entries a row.
        return_slots: return physical slots, ``block_table[b, pos // 64] * 64 + pos % 64``.

    Returns:
        ``[batch_size * next_n, topk]``, int32 request-local positions (or slots), score descending, position
        ascending among equal scores, -1 at the tail. A row of length <= 0 is all -1.

    Raises:
        ValueError: on a shape, dtype or device mismatch, or a negative ``topk``.
    """
    op = "paged_mqa_topk"
    dims = check_paged_indexer(op, q, index_cache, weights, cache_seqlens, block_table)
    require(op, topk >= 0, f"topk is {topk}, expected at least 0")
    rows = dims["batch_size"] * dims["next_n"]
    inputs = (q, index_cache, weights, cache_seqlens, block_table)
    if _arch.use_device_code(op, q) and accepts(*inputs) and 0 < topk <= MAX_TOPK and rows > 0:
        return paged_mqa_topk_sm90(*inputs, topk, return_slots)
    out = torch.full((rows, topk), -1, dtype=torch.int32, device=q.device)
    for request, length in enumerate(cache_seqlens.tolist()):
        if length <= 0:
            continue
        one = slice(request, request + 1)
        logits = paged_mqa_logits_torch(
            q[one], index_cache, weights[one], cache_seqlens[one], block_table[one], length
        )
        first = request * dims["next_n"]
        out[first : first + dims["next_n"]] = topk_indices_torch(logits, topk)
    return positions_to_slots(out, block_table, PAGE_SIZE) if return_slots and rows else out
