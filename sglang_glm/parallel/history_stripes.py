"""Decode context parallelism: the latents of a history in stripes over ranks.

A group of n ranks holds one history: rank r stores the latents of the slots with `slot % n == r`, in
row `slot // n` of its cache, and attends to those selected positions that it stores. Index keys are
whole on every rank, so every rank has the same selection. Partial results are joined by the weights
that their log-sum-exps give them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


def owned_rows(
    slots: torch.Tensor, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of some slots a rank stores, and where.

    Args:
        slots: `[n]` int.
        rank: Below `world_size`.
        world_size: Ranks that hold the history.

    Returns:
        Mask `[n]` of the slots that are this rank's, and the rows of these.
    """
    mine = slots % world_size == rank
    return mine, slots[mine] // world_size


def local_slots(slots: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Rows of this rank's cache for selected slots, -1 where another rank stores one or none is.

    Args:
        slots: Any shape, int32, -1 for none.
        rank: Below `world_size`.
        world_size: Ranks that hold the history.
    """
    mine = (slots >= 0) & (slots % world_size == rank)
    return torch.where(mine, slots // world_size, -1).to(slots.dtype)


def share_weights(lses: torch.Tensor) -> torch.Tensor:
    """What each part of an attention counts in the whole.

    Args:
        lses: `[parts, ...]` fp32, natural log-sum-exp of each part's scores, -inf for an empty part.

    Returns:
        The same shape, summing to 1 over the parts; 0 where all parts are empty.
    """
    whole = lses.logsumexp(dim=0)
    weights = (lses - whole.masked_fill(whole == float("-inf"), 0.0)).exp()
    return weights.masked_fill(lses == float("-inf"), 0.0)


def merge_over_ranks(out: torch.Tensor, lse: torch.Tensor, group: GroupCoordinator) -> torch.Tensor:
    """Join every rank's partial attention over all heads; each keeps the heads that are its own.

    Args:
        out: `[num_tokens, num_heads, dim]`, over the positions that this rank stores.
        lse: `[num_tokens, num_heads]` fp32 natural logarithm; -inf without positions.
        group: The ranks that hold the history.

    Returns:
        `[num_heads / world_size, num_tokens, dim]`, dtype of `out`.
    """
    lses = group.all_gather(lse[None], dim=0)
    weight = share_weights(lses)[group.rank_in_group]
    # Heads first: a contiguous share of them goes to each rank.
    weighted = (out.float() * weight[..., None]).transpose(0, 1).contiguous()
    return group.reduce_scatter_along_dim(weighted, dim=0).to(out.dtype)
