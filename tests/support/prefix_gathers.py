"""Gathers the pages of some batches between ranks and counts what arrived wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang_glm.parallel.page_shards import PageShard, ScratchSize, plan_gather
from sglang_glm.parallel.prefix_gather import PrefixGather, all_gather_beside

PAGES, LAYERS, WIDTHS = 9, 5, (96, 17)
SIZE = ScratchSize(prefix_pages=24, new_pages=3)


def page_bytes(layer: int, kind: int, page: int) -> torch.Tensor:
    """What a logical page holds, from its numbers alone: every rank can work out all of them."""
    rng = torch.Generator().manual_seed(1000 * layer + 100 * kind + page)
    return torch.randint(0, 256, (WIDTHS[kind],), dtype=torch.uint8, generator=rng)


def own_pages(shard: PageShard, layer: int, kind: int) -> torch.Tensor:
    """A rank's pages of one kind. Every second layer has none of the second kind."""
    if kind == 1 and layer % 2:
        return torch.empty(0, WIDTHS[kind], dtype=torch.uint8)
    numbers = range(shard.rank, PAGES * shard.world_size, shard.world_size)
    return torch.stack([page_bytes(layer, kind, page) for page in numbers])


def batches(world_size: int) -> list[list[torch.Tensor]]:
    """Prefixes of some batches, the same on every rank: many pages, none, one, those of one rank."""
    rng = torch.Generator().manual_seed(5)
    shuffled = world_size + torch.randperm((PAGES - 1) * world_size, generator=rng)
    empty = shuffled[:0]
    one_rank = shuffled[shuffled % world_size == 0][:4]
    return [
        [shuffled[:7], shuffled[2:5]],
        [empty],
        [shuffled[:1]],
        [one_rank, empty],
        [shuffled[:9]],
    ]


def count_wrong(world_size: int, device: str, collectives: bool, rank: int) -> tuple[int, int]:
    """Gather every batch, layer by layer.

    Args:
        world_size: Ranks of the default group.
        device: Of the pages.
        collectives: Whether the group sums something of its own before each layer.
        rank: This one.

    Returns:
        Pages compared, and how many of them differ from what their owner has.
    """
    shard = PageShard(rank=rank, world_size=world_size)
    halves = [
        [
            torch.full((SIZE.num_pages, width), 0xFF, dtype=torch.uint8, device=device)
            for width in WIDTHS
        ]
        for _ in range(2)
    ]
    sources = [
        [own_pages(shard, layer, kind).to(device) for kind in (0, 1)] for layer in range(LAYERS)
    ]
    gather = PrefixGather(
        shard, all_gather_beside(dist.group.WORLD), sources, (halves[0], halves[1])
    )
    compared = wrong = 0
    for prefixes in batches(world_size):
        plan = plan_gather(
            shard,
            [pages.to(device) for pages in prefixes],
            torch.tensor([PAGES * world_size], device=device),
            size=SIZE,
            num_logical_pages=PAGES * world_size + 1,
        )
        gather.begin(plan)
        for layer in range(LAYERS):
            if collectives:
                total = torch.ones(1 << 16, device=device)
                dist.all_reduce(total)
                wrong += int((total != world_size).any())
            half = halves[gather.half(layer)]
            for kind in (0,) if layer % 2 else (0, 1):
                for page in torch.cat(prefixes).tolist():
                    found = half[kind][plan.scratch_pages[page]].cpu()
                    wrong += not torch.equal(found, page_bytes(layer, kind, page))
                    compared += 1
    return compared, wrong
