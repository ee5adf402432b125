"""Cache slots of requests on the CPU: the page of an allocation, the block table of draft rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def alloc_page_size(batch: ScheduleBatch) -> int:
    """Slots that are handed out together; with decode context parallelism a page of every rank."""
    return batch.tree_cache.token_to_kv_pool_allocator.page_size


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Enter newly allocated slots into the block table.

    Args:
        req_pool_indices: `[batch_size]`, the table's row of each request.
        req_to_token: `[max_requests, max_context]` int32. Written.
        start_offset: `[batch_size]`, first new position of each request.
        end_offset: `[batch_size]`, the position after its last new one.
        out_cache_loc: Flat, the new slots of request after request.
        batch_size: Requests.
    """
    taken = 0
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in ranges:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(
            req_to_token.dtype
        )
        taken += end - start
