"""Pages of a prefix between processes over gloo: byte for byte, one layer ahead.

test_bytes          shuffled pages of three kinds of width reach every rank as their owners have them,
                    batch after batch in the same scratch
test_beside         a layer is gathered while the group does collectives of its own
test_in_order       layers are asked for in turn
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from sglang_glm.parallel.page_shards import PageShard, ScratchSize, plan_gather
from sglang_glm.parallel.prefix_gather import PrefixGather, all_gather_beside
from tests.support.ranks import run_ranks

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


def gather(rank: int, world_size: int) -> tuple[PageShard, PrefixGather, tuple]:
    shard = PageShard(rank=rank, world_size=world_size)
    scratch = tuple(
        tuple(torch.full((SIZE.num_pages, width), 0xFF, dtype=torch.uint8) for width in WIDTHS)
        for _ in range(2)
    )
    sources = [[own_pages(shard, layer, kind) for kind in (0, 1)] for layer in range(LAYERS)]
    return (
        shard,
        PrefixGather(shard, all_gather_beside(dist.group.WORLD), sources, scratch),
        scratch,
    )


def batches(world_size: int) -> list[list[torch.Tensor]]:
    """Prefixes of some batches, the same on every rank: none, one page, pages of one rank, many."""
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


def count_wrong(world_size: int, collectives: bool, rank: int) -> tuple[int, int]:
    """Pages compared, and how many of them differ from what their owner has."""
    shard, gathering, scratch = gather(rank, world_size)
    compared = wrong = 0
    for prefixes in batches(world_size):
        new_pages = torch.tensor([PAGES * world_size])
        plan = plan_gather(
            shard, prefixes, new_pages, size=SIZE, num_logical_pages=PAGES * world_size + 1
        )
        gathering.begin(plan)
        for layer in range(LAYERS):
            if collectives:
                total = torch.ones(1 << 16)
                dist.all_reduce(total)
                wrong += int((total != world_size).any())
            half = scratch[gathering.half(layer)]
            for kind in (0, 1):
                if kind == 1 and layer % 2:
                    continue
                for page in torch.cat(prefixes).tolist():
                    found = half[kind][int(plan.scratch_pages[page])]
                    wrong += not torch.equal(found, page_bytes(layer, kind, page))
                    compared += 1
    return compared, wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes(world_size: int) -> None:
    for compared, wrong in run_ranks(partial(count_wrong, world_size, False), world_size):
        assert compared > 100 and wrong == 0


def test_beside() -> None:
    for _, wrong in run_ranks(partial(count_wrong, 2, True), 2):
        assert wrong == 0


def test_in_order() -> None:
    shard = PageShard(rank=0, world_size=2)
    empty = torch.empty(0, 1, dtype=torch.uint8)
    gathering = PrefixGather(shard, None, [[empty]] * 3, ([empty], [empty]))
    plan = plan_gather(
        shard,
        [],
        torch.tensor([3]),
        size=ScratchSize(prefix_pages=2, new_pages=1),
        num_logical_pages=4,
    )
    gathering.begin(plan)
    assert [gathering.half(layer) for layer in (0, 0, 1)] == [0, 0, 1]
    for layer in (0, 3):
        with pytest.raises(RuntimeError, match=f"layer {layer} was asked for after layer 1"):
            gathering.half(layer)
    gathering.begin(plan)
    assert gathering.half(0) == 0
