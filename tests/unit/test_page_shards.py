"""Pages over ranks, and where a gathered batch stands in the scratch (T08).

test_one_owner          every slot has one rank, and each rank's rows are those of a cache of its own
test_padding_is_skipped negative slots are in no rank's rows
test_plan               each page of a batch has one place; what a rank sends arrives where readers look
test_shared_pages       a page that several requests share is gathered once
test_no_prefix          nothing is sent, new pages stand behind the blocks all the same
test_outside            slots of other pages and negative ones stay negative
test_too_large          a batch that the scratch cannot hold is refused, not cut
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_glm.parallel.page_shards import GatherPlan, PageShard, ScratchSize, plan_gather

PAGES_A_RANK = 12


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_one_owner(world_size: int) -> None:
    slots = torch.randperm(64 * PAGES_A_RANK * world_size)
    seen = torch.zeros(len(slots), dtype=torch.long)
    for rank in range(world_size):
        mine, rows = PageShard(rank=rank, world_size=world_size).owned(slots)
        seen += mine
        assert rows.sort().values.tolist() == list(range(64 * PAGES_A_RANK))
        # A page stays a page, row for row.
        assert torch.equal(rows % 64, slots[mine] % 64)
        assert torch.equal(rows // 64, slots[mine] // 64 // world_size)
    assert (seen == 1).all()


def test_padding_is_skipped() -> None:
    slots = torch.tensor([-1, -64, -65, 5])
    for rank in range(3):
        _, rows = PageShard(rank=rank, world_size=3).owned(slots)
        assert [row for row in rows.tolist() if row >= 0] == ([5] if rank == 0 else [])


def plans(
    world_size: int, prefixes: list[torch.Tensor], new_pages: torch.Tensor, size: ScratchSize
) -> list[GatherPlan]:
    return [
        plan_gather(
            PageShard(rank=rank, world_size=world_size),
            prefixes,
            new_pages,
            size=size,
            num_logical_pages=PAGES_A_RANK * world_size,
        )
        for rank in range(world_size)
    ]


def gathered(world_size: int, made: list[GatherPlan], size: ScratchSize) -> list[int]:
    """The logical page in each page of the scratch once all have sent; -1 where nothing stands."""
    found = [-1] * size.num_pages
    for rank, plan in enumerate(made):
        for place, page in enumerate(plan.send_pages.tolist()):
            found[rank * plan.block_pages + place] = page * world_size + rank
    return found


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_plan(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 5))
    usable = range(world_size, PAGES_A_RANK * world_size)
    shuffled = data.draw(st.permutations(usable))
    num_new = data.draw(st.integers(1, 6))
    new_pages, cached = shuffled[:num_new], shuffled[num_new:]
    prefixes = data.draw(
        st.lists(st.lists(st.sampled_from(cached), unique=True, max_size=8), min_size=1, max_size=3)
    )
    size = ScratchSize(prefix_pages=PAGES_A_RANK * world_size, new_pages=num_new)
    made = plans(
        world_size,
        [torch.tensor(pages, dtype=torch.int64) for pages in prefixes],
        torch.tensor(new_pages),
        size,
    )
    found = gathered(world_size, made, size)
    for plan in made:
        assert torch.equal(plan.scratch_pages, made[0].scratch_pages)
        assert plan.block_pages == made[0].block_pages == len(plan.send_pages)
    places = made[0].scratch_pages.tolist()
    prefix_pages = {page for pages in prefixes for page in pages}
    for page in prefix_pages:
        assert found[places[page]] == page
    assert [places[page] for page in new_pages] == list(range(size.prefix_pages, size.num_pages))
    used = prefix_pages | set(new_pages)
    assert all(place == -1 for page, place in enumerate(places) if page not in used)
    assert len({places[page] for page in used}) == len(used)


def test_shared_pages() -> None:
    size = ScratchSize(prefix_pages=4, new_pages=1)
    prefix = torch.tensor([2, 3, 4])
    made = plans(2, [prefix, prefix, prefix[:2]], torch.tensor([9]), size)
    assert [plan.send_pages.tolist() for plan in made] == [[1, 2], [1, 0]]
    assert made[0].scratch_pages[[2, 4, 3, 9]].tolist() == [0, 1, 2, 4]


def test_no_prefix() -> None:
    size = ScratchSize(prefix_pages=4, new_pages=2)
    empty = torch.tensor([], dtype=torch.int64)
    for plan in plans(2, [empty, empty], torch.tensor([7, 2]), size):
        assert plan.block_pages == 0 and len(plan.send_pages) == 0
        assert plan.slots(torch.tensor([7 * 64 + 3, 2 * 64])).tolist() == [4 * 64 + 3, 5 * 64]


def test_outside() -> None:
    size = ScratchSize(prefix_pages=2, new_pages=1)
    plan = plans(2, [torch.tensor([2])], torch.tensor([3]), size)[0]
    assert (
        plan.slots(torch.tensor([0, 4 * 64, 5 * 64 + 63, -1, -64], dtype=torch.int32)) < 0
    ).all()
    # The last page, which a negative index would name.
    last = PAGES_A_RANK * 2 - 1
    plan = plans(2, [torch.tensor([2])], torch.tensor([last]), size)[0]
    assert plan.slots(torch.tensor([-1, last * 64])).tolist() == [-1, 2 * 64]


@pytest.mark.parametrize("prefix, new", [([2, 4, 6], [9]), ([2], [9, 11])])
def test_too_large(prefix: list[int], new: list[int]) -> None:
    size = ScratchSize(prefix_pages=4, new_pages=1)
    with pytest.raises(ValueError, match="expected at most 4 and 1"):
        plans(2, [torch.tensor(prefix)], torch.tensor(new), size)
