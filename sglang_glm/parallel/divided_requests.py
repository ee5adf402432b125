"""Index scan divided by request: each rank selects for a part of the batch, all get every selection.

Ranks of an attention group hold the whole index cache and the same queries. A rank that selects for
some of the requests alone leaves nothing to merge: one all-gather of the selections, four bytes an
entry. Dividing each history instead (`index_scan`) moves eight bytes an entry from every rank to every
rank, and ranks what arrived once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class RankGroup(Protocol):
    """What is asked of SGLang's group of ranks."""

    rank_in_group: int
    world_size: int

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Bring every rank's `input` to all, in order of ranks."""


def own_requests(batch_size: int, rank: int, world_size: int) -> range:
    """Requests that one rank selects for.

    Args:
        batch_size: At least 1.
        rank: Below `world_size`.
        world_size: Ranks that divide the batch.

    Returns:
        As many on every rank, so that sizes are static in a CUDA graph; where the batch does not
        divide, the last ranks' overlap with those before.
    """
    count = -(-batch_size // world_size)
    first = min(rank * count, batch_size - count)
    return range(first, first + count)


def select_divided(
    select: Callable[[range], torch.Tensor], batch_size: int, group: RankGroup
) -> torch.Tensor:
    """Selections of all requests, each computed by one rank.

    Args:
        select: From requests to their selections, `[len(requests) * next_n, topk]` int32.
        batch_size: Requests, the same on every rank; or rows, each a request of its own.
        group: The ranks.

    Returns:
        `[batch_size * next_n, topk]` int32, the same on every rank: each row as `select` gives it.
    """
    world_size = group.world_size
    own = select(own_requests(batch_size, group.rank_in_group, world_size)).contiguous()
    gathered = own.new_empty(world_size * own.shape[0], own.shape[1])
    group.all_gather_into_tensor(gathered, own)
    if batch_size % world_size == 0:
        return gathered
    return join(gathered, batch_size, world_size)


def join(gathered: torch.Tensor, batch_size: int, world_size: int) -> torch.Tensor:
    """Drop what several ranks computed.

    Args:
        gathered: `[world_size * count * next_n, topk]`, of `own_requests` of each rank.
        batch_size: Requests.
        world_size: Ranks.

    Returns:
        `[batch_size * next_n, topk]`.
    """
    count = -(-batch_size // world_size)
    next_n = gathered.shape[0] // (world_size * count)
    parts = []
    for rank, part in enumerate(gathered.chunk(world_size)):
        # The first request that no rank before this one has.
        first = min(rank * count, batch_size)
        parts.append(part[(first - own_requests(batch_size, rank, world_size).start) * next_n :])
    return torch.cat(parts)
