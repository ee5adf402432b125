"""A history in stripes over ranks gives what the whole history gives (T24).

test_rows_stored_once   every slot has one owner, and rows are those that slots are read at
test_parts_join         partial attentions joined by their log-sum-exps; a rank without selected
                        positions, a row without any
"""

from __future__ import annotations

import pytest
import torch
from glm_kernels.attention.sparse_mla import sparse_mla

from sglang_glm.parallel.history_stripes import local_slots, owned_rows, share_weights

SCALE = 256**-0.5


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_rows_stored_once(world_size: int) -> None:
    slots = torch.randperm(64 * world_size)
    seen = torch.zeros(len(slots), dtype=torch.long)
    for rank in range(world_size):
        mine, rows = owned_rows(slots, rank, world_size)
        seen += mine
        assert rows.sort().values.tolist() == list(range(64))
        assert torch.equal(local_slots(slots.int(), rank, world_size)[mine], rows.int())
        assert (local_slots(slots.int(), rank, world_size)[~mine] == -1).all()
    assert (seen == 1).all()
    assert (local_slots(torch.full((3,), -1), 0, world_size) == -1).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_join(world_size: int) -> None:
    num_slots = 40 * world_size
    whole_cache = torch.randn(num_slots, 1, 576)
    q = torch.randn(5, 4, 576)
    slots = torch.stack([torch.randperm(num_slots)[:24] for _ in range(5)]).int()
    slots[:, 20:] = -1
    slots[1] = slots[1] // world_size * world_size  # the first rank's alone
    slots[2] = -1
    expected, _ = sparse_mla(q, whole_cache, slots, SCALE)
    outs, lses = [], []
    for rank in range(world_size):
        stripe = whole_cache[rank::world_size]
        out, lse = sparse_mla(q, stripe, local_slots(slots, rank, world_size), SCALE)
        outs.append(out)
        lses.append(lse)
    weights = share_weights(torch.stack(lses))
    joined = (torch.stack(outs) * weights[..., None]).sum(dim=0)
    torch.testing.assert_close(joined, expected, atol=1e-6, rtol=1e-5)
    assert weights[0, 1].eq(1).all() and weights[:, 2].eq(0).all()
    assert torch.equal(joined[2], torch.zeros(4, 512))
