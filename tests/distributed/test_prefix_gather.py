"""Pages of a prefix between processes over gloo: byte for byte, one layer ahead.

test_bytes          shuffled pages of two widths reach every rank as their owners have them, batch
                    after batch in the same scratch
test_beside         a layer is gathered while the group does collectives of its own
test_in_order       layers are asked for in turn
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sglang_glm.parallel.page_shards import PageShard, ScratchSize, plan_gather
from sglang_glm.parallel.prefix_gather import PrefixGather
from tests.support.prefix_gathers import count_wrong
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes(world_size: int) -> None:
    for compared, wrong in run_ranks(partial(count_wrong, world_size, "cpu", False), world_size):
        assert compared > 100 and wrong == 0


def test_beside() -> None:
    for compared, wrong in run_ranks(partial(count_wrong, 2, "cpu", True), 2):
        assert compared > 100 and wrong == 0


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
