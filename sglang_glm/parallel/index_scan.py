"""Index scan divided over ranks: each scores a part of the history, all select the same positions.

Under tensor parallelism every rank of an attention group holds the whole index cache and would score
all of it. Here rank r scores a contiguous share, keeps its best `index_topk` positions as candidates,
and one all-gather brings every rank all candidates. A position among the best of the whole history is
among the best of its share, so the merge is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.topk_indices import topk_indices


def history_share(cache_seqlen: int, rank: int, world_size: int) -> range:
    """Positions of a request's history that one rank scores.

    Args:
        cache_seqlen: Positions in the cache.
        rank: Below `world_size`.
        world_size: Ranks that divide the history.

    Returns:
        Whole pages of 64, the last one cut at the length; ascending with the rank, empty where there
        are fewer pages than ranks.
    """
    num_pages = -(-cache_seqlen // PAGE_SIZE)
    first, last = (part * num_pages // world_size * PAGE_SIZE for part in (rank, rank + 1))
    return range(min(first, cache_seqlen), min(last, cache_seqlen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Positions that may be selected: those of each share best first, by ascending position where equal.

    Attributes:
        scores: `[num_rows, width]` fp32, -inf in padding.
        positions: `[num_rows, width]` int32, request-local, -1 in padding.
    """

    scores: torch.Tensor
    positions: torch.Tensor


def local_candidates(
    logits: torch.Tensor, row_ends: torch.Tensor, first_position: int, index_topk: int
) -> Candidates:
    """The best `index_topk` positions of a share.

    Args:
        logits: `[num_rows, share]` fp32 scores of the share's positions.
        row_ends: `[num_rows]` int, how many positions of the whole history each row sees.
        first_position: Position of the first column.
        index_topk: Candidates a row.

    Returns:
        `[num_rows, index_topk]`. NaN and -inf are no candidates.
    """
    num_rows, width = logits.shape
    if width == 0:
        return Candidates(
            scores=logits.new_full((num_rows, index_topk), float("-inf")),
            positions=logits.new_full((num_rows, index_topk), -1, dtype=torch.int32),
        )
    ends = (row_ends - first_position).clamp(0, width).int()
    columns = topk_indices(logits, index_topk, torch.zeros_like(ends), ends)
    is_padding = columns < 0
    scores = logits.gather(1, columns.clamp_min(0).long())
    return Candidates(
        scores=scores.masked_fill(is_padding, float("-inf")),
        positions=(columns + first_position).masked_fill(is_padding, -1),
    )


def merge_candidates(candidates: Candidates, index_topk: int) -> torch.Tensor:
    """Select among the candidates of all shares.

    Args:
        candidates: Shares side by side in order of their positions.
        index_topk: Positions to select.

    Returns:
        `[num_rows, index_topk]` int32, score descending, position ascending among equal scores, -1
        at the tail: what a selection over the whole history gives.
    """
    # Equal scores stand in order of positions, within a share and from share to share, so the
    # selection's rule for ties is that of positions.
    columns = topk_indices(candidates.scores, index_topk)
    positions = candidates.positions.gather(1, columns.clamp_min(0).long())
    return positions.masked_fill(columns < 0, -1)


def gather_candidates(own: Candidates, group: dist.ProcessGroup) -> Candidates:
    """Bring every rank the candidates of all, in order of ranks.

    Args:
        own: `[num_rows, width]`, the same rows on every rank.
        group: The ranks that divided the history.

    Returns:
        `[num_rows, world_size * width]`.
    """
    world_size = dist.get_world_size(group)
    # One message for both: a score and a position are four bytes each.
    packed = torch.stack([own.scores.view(torch.int32), own.positions])  # [2, rows, width]
    gathered = packed.new_empty(world_size, *packed.shape)
    dist.all_gather_into_tensor(gathered.view(-1), packed.view(-1), group=group)
    scores, positions = gathered.unbind(1)  # each [world_size, rows, width]
    joined = [part.transpose(0, 1).flatten(1) for part in (scores, positions)]
    return Candidates(scores=joined[0].view(torch.float32), positions=joined[1])
