"""A cache sharded by pages: which rank keeps a page, and where a batch finds it once gathered.

A group of n ranks shares one address space: logical page p is page `p // n` of rank `p % n`. Page 0 of
every rank, logical pages 0 to n - 1, takes the writes of padded rows. A prefix is gathered into a
scratch of pages, one equal block from each rank; the batch's new pages stand behind the blocks. Plans
are made from numbers that all ranks have, so all make the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from glm_kernels.cache.layout import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShard:
    """One rank's part of a group's pages."""

    rank: int
    world_size: int

    def owned(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of some logical slots this rank keeps, and in which rows.

        Args:
            slots: `[n]` int; negative ones are rows to skip, and stay negative.

        Returns:
            Mask `[n]` of the slots that are this rank's, and the rows of these in its cache.
        """
        pages = slots // PAGE_SIZE
        mine = pages % self.world_size == self.rank
        return mine, pages[mine] // self.world_size * PAGE_SIZE + slots[mine] % PAGE_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchSize:
    """Pages that a batch may gather and write.

    Attributes:
        prefix_pages: For the blocks of all ranks; a multiple of their number.
        new_pages: Behind them.
    """

    prefix_pages: int
    new_pages: int

    @property
    def num_pages(self) -> int:
        """Pages of the whole scratch."""
        return self.prefix_pages + self.new_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """Where the pages of one batch stand in the scratch.

    Attributes:
        block_pages: Pages that each rank sends; 0 where no request has a prefix.
        send_pages: `[block_pages]` int64, pages of this rank's cache; page 0 where another rank has
            more to send.
        scratch_pages: `[num_logical_pages]` int64, -1 for pages that the batch does not use.
    """

    block_pages: int
    send_pages: torch.Tensor
    scratch_pages: torch.Tensor

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Scratch slots of logical slots, same shape, int64; negative outside the batch's pages."""
        slots = slots.long()
        # A negative slot divides to the last page, and must not be taken for one.
        pages = self.scratch_pages[(slots // PAGE_SIZE).clamp_min(0)]
        return torch.where(slots < 0, -1, pages * PAGE_SIZE + slots % PAGE_SIZE)


def plan_gather(
    shard: PageShard,
    prefixes: Sequence[torch.Tensor],
    new_pages: torch.Tensor,
    *,
    size: ScratchSize,
    num_logical_pages: int,
) -> GatherPlan:
    """Place a batch's pages: prefixes by owner, then by page, so that a rank's are one block.

    Args:
        shard: This rank.
        prefixes: Logical pages of each request's prefix, int64; a page that several share is
            gathered once.
        new_pages: `[n]` int64 logical pages that the batch writes, each once.
        size: What fits.
        num_logical_pages: Pages of all ranks, the padding pages included.

    Raises:
        ValueError: the batch does not fit; says what was needed.
    """
    device = new_pages.device
    scratch_pages = torch.full((num_logical_pages,), -1, dtype=torch.int64, device=device)
    pages = torch.cat([*prefixes, new_pages[:0]]).unique()
    owners = pages % shard.world_size
    counts = torch.bincount(owners, minlength=shard.world_size)
    block_pages = int(counts.max())
    needed = shard.world_size * block_pages
    if needed > size.prefix_pages or len(new_pages) > size.new_pages:
        raise ValueError(
            f"a batch gathers {needed} pages and writes {len(new_pages)}, expected at most "
            f"{size.prefix_pages} and {size.new_pages}: the scheduler admits no larger one"
        )
    order = owners.argsort(stable=True)
    pages, owners = pages[order], owners[order]
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(pages), device=device) - starts[owners]
    scratch_pages[pages] = owners * block_pages + places
    scratch_pages[new_pages] = size.prefix_pages + torch.arange(len(new_pages), device=device)
    send_pages = torch.zeros(block_pages, dtype=torch.int64, device=device)
    own = pages[owners == shard.rank] // shard.world_size
    send_pages[: len(own)] = own
    return GatherPlan(block_pages=block_pages, send_pages=send_pages, scratch_pages=scratch_pages)
