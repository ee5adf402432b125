"""Exact selection from a matrix of index scores, in the three forms that SGLang's attention reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.topk_indices import topk_indices

if TYPE_CHECKING:
    import torch


def select_positions(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    row_to_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the best `topk` columns of each row's window.

    Args:
        logits: `[rows, width]` fp32. What lies outside a row's window may be anything.
        lengths: `[rows]` int32, columns of each window.
        topk: Entries a row.
        row_starts: `[rows]` int32, first column of each window; None is 0.
        block_table: `[requests, pages]` int32. With it the result holds physical slots.
        row_to_batch: `[rows]` int32, request of each row; None spreads the rows evenly.

    Returns:
        `[rows, topk]` int32, positions within the window or slots; score descending, ties to the
        lower position, -1 at the tail.
    """
    starts = None if row_starts is None else row_starts.int().contiguous()
    ends = lengths.int() if starts is None else starts + lengths.int()
    return topk_indices(
        logits,
        topk,
        starts,
        ends.contiguous(),
        block_table=block_table if block_table is None else block_table.contiguous(),
        page_size=PAGE_SIZE,
        row_to_batch=None if row_to_batch is None else row_to_batch.int().contiguous(),
    )


def select_ragged(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    offsets: torch.Tensor,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `select_positions`, relative to the concatenated keys of the batch.

    Args:
        logits: `[rows, width]` fp32.
        lengths: `[rows]` int32.
        topk: Entries a row.
        offsets: `[rows]` int32, where the row's request begins among the batch's keys.
        row_starts: `[rows]` int32 or None.

    Returns:
        `[rows, topk]` int32, -1 padded.
    """
    positions = select_positions(logits, lengths, topk, row_starts)
    return (positions + offsets.int()[:, None]).masked_fill(positions < 0, -1)
