"""The portable all-to-all over NCCL: against the loops, then timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang_glm.parallel.all_to_all import Dispatched, combine, dispatch
from tests.gpu.parallel.exchange_case import (
    ExchangeCase,
    check_against_loops,
    check_arrived,
    expected_output,
    expert_scales,
    rank_inputs,
    relative_error,
    rows_to_others,
)
from tests.gpu.parallel.prediction import predicted

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks

ROUTING_BYTES = 8
#: Two roundings to BF16: an expert's output, and the sum.
MAX_ERROR = 4e-3


def experts(case: ExchangeCase, rank: int, arrived: Dispatched) -> torch.Tensor:
    """`[num_received, hidden]` bf16, the weighted sum over this rank's experts."""
    first = rank * case.num_local_experts
    scales = expert_scales(case, str(arrived.hidden_states.device))[first:]
    chosen = scales[arrived.topk_ids.long().clamp_min(0)]
    factor = (arrived.topk_weights * chosen).sum(dim=1, keepdim=True)
    return (arrived.hidden_states.float() * factor).bfloat16()


def run_case(ranks: Ranks, case: ExchangeCase, *, loops: bool = False) -> float:
    """Exchange once and check; with `loops` also against the looping references.

    Returns:
        The output's relative error, the largest of the ranks.

    Raises:
        AssertionError: something arrived wrong, or the error is above rounding.
    """
    inputs = rank_inputs(case, ranks.rank, ranks.device)
    arrived, route = dispatch(
        inputs.hidden_states,
        inputs.topk_ids,
        inputs.topk_weights,
        num_experts=case.num_experts,
        group=dist.group.WORLD,
    )
    if loops:
        check_against_loops(case, inputs)
        check_arrived(
            case, ranks.rank, arrived.hidden_states, arrived.topk_ids, arrived.topk_weights
        )
    out = combine(experts(case, ranks.rank, arrived), route, group=dist.group.WORLD)
    error = ranks.most(relative_error(out, expected_output(case, inputs)))
    assert error <= MAX_ERROR, f"portable, {case.name}: error {error:.2e}, expected {MAX_ERROR}"
    return error


def check(ranks: Ranks, **sizes: int) -> None:
    """Small cases against the loops: even, uneven, one rank without tokens."""
    for counts in ((24,) * ranks.world_size, range(3, 3 + ranks.world_size), _one_idle(ranks)):
        run_case(ranks, ExchangeCase(num_tokens=tuple(counts), **sizes), loops=True)


def _one_idle(ranks: Ranks) -> tuple[int, ...]:
    return (0, *[17] * (ranks.world_size - 1))


def run(ranks: Ranks, token_counts: tuple[int, ...] = (8, 32, 128, 1024, 4096)) -> None:
    """Check, then time dispatch and combine at GLM's sizes."""
    check(ranks)
    ranks.say("portable: equal to the loops")
    for count in token_counts:
        case = ExchangeCase(num_tokens=(count,) * ranks.world_size)
        error = run_case(ranks, case)
        inputs = rank_inputs(case, ranks.rank, ranks.device)

        def send(case: ExchangeCase = case, inputs=inputs) -> tuple:
            return dispatch(
                inputs.hidden_states,
                inputs.topk_ids,
                inputs.topk_weights,
                num_experts=case.num_experts,
                group=dist.group.WORLD,
            )

        arrived, route = send()
        output = experts(case, ranks.rank, arrived)
        sent = ranks.most(rows_to_others(case, inputs, ranks.rank))
        row_bytes = 2 * case.hidden_size
        for op, call, extra in (
            ("dispatch", send, ROUTING_BYTES * case.num_topk),
            (
                "combine",
                lambda output=output, route=route: combine(output, route, group=dist.group.WORLD),
                0,
            ),
        ):
            ranks.row(
                op=op,
                form="portable",
                shape=case.name,
                dtype="bf16",
                **ranks.times_us(call),
                bytes=int(sent * (row_bytes + extra)),
                **predicted(
                    op,
                    case.world_size,
                    sum(case.num_tokens),
                    copies="rank",
                    row_bytes=row_bytes + extra,
                ),
                max_error=error,
            )
