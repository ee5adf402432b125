"""Scores and selection for several newest rows of each request: a key is read once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm_kernels.indexer.paged_mqa_topk import paged_mqa_topk

from sglang_glm.parallel.divided_requests import select_divided

if TYPE_CHECKING:
    import torch

    from sglang_glm.parallel.divided_requests import RankGroup


def select_verify_rows(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    *,
    return_slots: bool,
    divided_over: RankGroup | None = None,
) -> torch.Tensor:
    """Select for the newest rows of each request.

    Args:
        q: `[batch_size * next_n, index_heads, 128]` e4m3, scale folded into `weights`.
        weights: `[batch_size * next_n, index_heads]` fp32.
        index_cache: `[num_pages, 8448]` uint8.
        cache_seqlens: `[batch_size]` int32, cached length with the new rows.
        block_table: `[batch_size * next_n, pages]` int32: SGLang repeats a request's table for each
            of its rows. One of the copies is read.
        topk: Entries a row.
        return_slots: Physical slots instead of request-local positions.
        divided_over: Ranks with the same arguments, each of which selects for some of the requests;
            None selects for all here.

    Returns:
        `[batch_size * next_n, topk]` int32, -1 padded; the same however it is divided.
    """
    batch_size = cache_seqlens.shape[0]
    next_n = q.shape[0] // batch_size
    tables = block_table.unflatten(0, (batch_size, next_n))[:, 0]
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    queries = q.view(batch_size, next_n, *q.shape[1:])
    heads = weights.view(batch_size, next_n, -1)

    def select(requests: range) -> torch.Tensor:
        some = slice(requests.start, requests.stop)
        return paged_mqa_topk(
            queries[some],
            index_cache,
            heads[some],
            cache_seqlens[some],
            tables[some],
            topk,
            return_slots=return_slots,
        )

    if divided_over is None:
        return select(range(batch_size))
    return select_divided(select, batch_size, divided_over)
