"""Unions of selections, verify attention and split planning, in their CPU forms.

| test | catches |
| --- | --- |
| union equals sets, -1 anywhere | a token's bit lost, padding that joins the union |
| verify equals token by token | a member bit of the wrong token, entries past the count |
| splits fill the GPU and never exceed the tiles | one token on one multiprocessor |
| refusals | nine tokens in eight bits |
"""

import pytest
import torch
from glm_kernels.attention.plan_splits import plan_splits
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_verify import sparse_mla_verify
from glm_kernels.attention.union_slots import union_slots
from glm_kernels.testing.generate import sparse_mla_inputs
from glm_kernels.testing.numeric import assert_attention, assert_lse
from glm_kernels.testing.shapes import MlaShape


@pytest.mark.parametrize("next_n", [1, 2, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_verify_equals_token_by_token(next_n: int, packed: bool) -> None:
    shape = MlaShape(
        name="v", num_tokens=3 * next_n, num_heads=2, topk=20, num_slots=90, shared=next_n
    )
    x = sparse_mla_inputs(shape, packed, hole_rate=0.2, union=30)
    lists, members, counts = union_slots(x.slots, next_n)
    for request, count in enumerate(counts.tolist()):
        rows = x.slots[request * next_n : (request + 1) * next_n]
        assert set(lists[request, :count].tolist()) == set(rows.flatten().tolist()) - {-1}
        for token, row in enumerate(rows):
            chosen = lists[request, :count][(members[request, :count] >> token & 1).bool()]
            assert set(chosen.tolist()) == set(row.tolist()) - {-1}
    # Entries past the count must not matter.
    for request, count in enumerate(counts.tolist()):
        members[request, count:] = 255
    out, lse = sparse_mla_verify(x.q, x.kv_cache, lists, members, counts, x.softmax_scale)
    want, want_lse = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    assert_attention(out, want, "verify", atol=2e-6, rtol=1e-5, cosine=1e-11)
    assert_lse(lse, want_lse, "verify")


def test_splits() -> None:
    assert plan_splits(1, 2048, 132) == 16
    assert plan_splits(8192, 2048, 132) == 1
    assert plan_splits(4, 17, 132) == 1
    for groups in (1, 3, 8, 32, 37, 132, 192):
        splits = plan_splits(groups, 2048, 132)
        assert 1 <= splits <= 32
        assert groups * splits >= min(groups * 16, 100)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="next_n is 9"):
        union_slots(torch.zeros(9, 4, dtype=torch.int32), 9)
    with pytest.raises(ValueError, match="5 rows are not a multiple of 2"):
        union_slots(torch.zeros(5, 4, dtype=torch.int32), 2)
