"""The portable all-to-all on two gloo ranks against loops in one process.

test_dispatch       rows, their order, local ids and weights are the reference's, in each case
test_round_trip     dispatch, linear experts, combine give what one process computes; BF16 on the wire too
test_repeatable     the same bits twice
test_refusals       experts that do not divide, an id out of range, rows that were not dispatched

Cases: both ranks busy; one without tokens; all tokens for one rank; tokens without experts; one token.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sglang_glm.parallel.all_to_all import combine, dispatch
from sglang_glm.parallel.all_to_all_ref import dispatch_ref, moe_ref
from tests.support.ranks import run_ranks

NUM_EXPERTS, HIDDEN, TOPK = 8, 16, 3
#: Tokens of each rank, and the experts that they may choose.
CASES = {
    "busy": ((5, 9), range(8)),
    "idle": ((0, 7), range(8)),
    "both_idle": ((0, 0), range(8)),
    "one_sided": ((4, 6), range(4)),
    "none_chosen": ((3, 2), range(0)),
    "single": ((1, 0), range(8)),
}


def inputs(case: str, rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states, ids (some -1) and weights that `rank` holds."""
    counts, allowed = CASES[case]
    generator = torch.Generator().manual_seed(17 * rank + len(case))
    count = counts[rank]
    hidden = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    ids = torch.full((count, TOPK), -1, dtype=torch.int32)
    if len(allowed):
        order = torch.rand(count, len(allowed), generator=generator).argsort(dim=1)[:, :TOPK]
        ids = torch.tensor(allowed)[order].int()
        ids[torch.rand(count, TOPK, generator=generator) < 0.2] = -1
    return hidden, ids, torch.rand(count, TOPK, generator=generator)


def experts() -> torch.Tensor:
    return torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))


def round_trip(case: str, rank: int, dtype: torch.dtype) -> torch.Tensor:
    arrived, route = dispatch(
        *inputs(case, rank, dtype), num_experts=NUM_EXPERTS, group=dist.group.WORLD
    )
    local = experts()[rank * 4 : rank * 4 + 4]
    computed = moe_ref(arrived.hidden_states, arrived.topk_ids, arrived.topk_weights, local)
    return combine(computed.to(dtype), route, group=dist.group.WORLD)


def refusals() -> list[str]:
    hidden, ids, weights = (
        torch.zeros(1, HIDDEN),
        torch.zeros(1, TOPK, dtype=torch.int32),
        torch.zeros(1, TOPK),
    )
    group, found = dist.group.WORLD, []
    arrived, route = dispatch(hidden, ids, weights, num_experts=NUM_EXPERTS, group=group)
    for call in (
        lambda: dispatch(hidden, ids, weights, num_experts=7, group=group),
        lambda: dispatch(hidden, ids + 8, weights, num_experts=8, group=group),
        lambda: combine(torch.zeros(len(arrived.hidden_states) + 1, HIDDEN), route, group=group),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def program(rank: int) -> dict:
    """Everything that this file looks at: starting ranks costs more than what they do."""
    dispatched = {}
    for case in CASES:
        arrived, _ = dispatch(*inputs(case, rank), num_experts=NUM_EXPERTS, group=dist.group.WORLD)
        dispatched[case] = (arrived.hidden_states, arrived.topk_ids, arrived.topk_weights)
    return {
        "dispatch": dispatched,
        "round_trip": {(case, d): round_trip(case, rank, d) for case in CASES for d in DTYPES},
        "again": {(case, d): round_trip(case, rank, d) for case in CASES for d in DTYPES},
        "refusals": refusals(),
    }


DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(program)


@pytest.mark.parametrize("case", CASES)
def test_dispatch(ranks: list[dict], case: str) -> None:
    expected = dispatch_ref(
        *zip(*(inputs(case, rank) for rank in range(2)), strict=True), NUM_EXPERTS
    )
    for rank, rows in enumerate(expected):
        hidden, ids, weights = ranks[rank]["dispatch"][case]
        assert hidden.shape == (len(rows), HIDDEN)
        assert ids.tolist() == [row[3] for row in rows]
        for got_hidden, got_weights, row in zip(hidden, weights.tolist(), rows, strict=True):
            assert torch.equal(got_hidden, row[2])
            assert got_weights == row[4]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(ranks: list[dict], case: str, dtype: torch.dtype, tolerance: float) -> None:
    for rank in range(2):
        got = ranks[rank]["round_trip"][case, dtype]
        hidden, ids, weights = inputs(case, rank, dtype)
        expected = moe_ref(hidden, ids, weights, experts())
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_repeatable(ranks: list[dict]) -> None:
    for rank in ranks:
        for key, first in rank["round_trip"].items():
            assert torch.equal(first, rank["again"][key]), key


def test_refusals(ranks: list[dict]) -> None:
    for rank in ranks:
        experts_error, id_error, rows_error = rank["refusals"]
        assert "7 experts over 2 ranks" in experts_error
        assert "holds 8, expected ids below 8" in id_error
        assert "expected the" in rows_error
