"""Paged index scores request by request; serves CPU traffic."""

import torch

from glm_kernels.cache.index_pages import load_index_k
from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.mqa_logits_torch import index_scores


def paged_mqa_logits_torch(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    max_context: int,
) -> torch.Tensor:
    """Vectorised form of ``paged_mqa_logits``; arguments as there."""
    batch_size, next_n = q.shape[:2]
    out = torch.full((batch_size * next_n, max_context), float("-inf"), device=q.device)
    for request, length in enumerate(cache_seqlens.tolist()):
        if length <= 0:
            continue
        position = torch.arange(length, device=q.device)
        slots = (
            block_table[request, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        )
        if index_cache.dtype == torch.uint8:
            keys = load_index_k(index_cache, slots)
        else:
            keys = index_cache[slots].float()
        scores = index_scores(q[request].float(), keys, weights[request].float())
        row_len = length - next_n + 1 + torch.arange(next_n, device=q.device)
        scores.masked_fill_(position >= row_len[:, None], float("-inf"))
        out[request * next_n : (request + 1) * next_n, :length] = scores
    return out
