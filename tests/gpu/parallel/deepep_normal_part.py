"""DeepEP's normal mode (prefill): a probe, then against the loops, then timed; BF16 and FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang_glm.parallel.all_to_all import Dispatched
from tests.gpu.parallel.exchange_case import (
    ExchangeCase,
    RankInputs,
    check_arrived,
    expected_output,
    rank_inputs,
    relative_error,
    rows_to_others,
)
from tests.gpu.parallel.fp8_blocks import dequantize_rows, quantize_rows
from tests.gpu.parallel.portable_part import MAX_ERROR, experts
from tests.gpu.parallel.prediction import predicted

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks

BUFFER_BYTES = 1 << 30
#: An e4m3 code is at most 1/16 of its value away from it; evenly spread that is 1/16/sqrt(3) or less.
MAX_FP8_ERROR = 0.036


#: BF16, or e4m3 codes with their scales.
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def rows_to_send(inputs: RankInputs, *, fp8: bool) -> Rows:
    """A rank's hidden rows in the form that travels."""
    return quantize_rows(inputs.hidden_states) if fp8 else inputs.hidden_states


def ids_of(inputs: RankInputs) -> torch.Tensor:
    """Expert ids in the integer type that this build of DeepEP takes."""
    import deep_ep

    return inputs.topk_ids.to(deep_ep.topk_idx_t)


class NormalMode:
    """Dispatch and combine of one buffer."""

    def __init__(self) -> None:
        import deep_ep

        self.buffer = deep_ep.Buffer(dist.group.WORLD, BUFFER_BYTES, 0, low_latency_mode=False)

    def dispatch(self, case: ExchangeCase, inputs: RankInputs, rows: Rows) -> tuple:
        """Send `rows`; returns what arrived (FP8 pairs still packed) and DeepEP's handle."""
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
            ids_of(inputs), case.num_experts
        )
        received, ids, weights, _, handle, _ = self.buffer.dispatch(
            rows,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_of(inputs),
            topk_weights=inputs.topk_weights,
        )
        return received, ids, weights, handle

    def dispatch_again(self, rows: Rows, handle: tuple) -> Rows:
        """Send `rows` the way that is known from before: nothing passes through the host."""
        return self.buffer.dispatch(rows, handle=handle)[0]

    def arrived(self, received: Rows, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """The same in the portable form, weights zero where the id is -1."""
        hidden = dequantize_rows(*received) if isinstance(received, tuple) else received
        weights = weights.masked_fill(ids < 0, 0)
        return Dispatched(hidden_states=hidden.bfloat16(), topk_ids=ids, topk_weights=weights)

    def combine(self, output: torch.Tensor, handle: tuple) -> torch.Tensor:
        return self.buffer.combine(output, handle)[0]


def run_case(ranks: Ranks, mode: NormalMode, case: ExchangeCase, *, fp8: bool) -> float:
    """Exchange once; returns the output's relative error."""
    inputs = rank_inputs(case, ranks.rank, ranks.device)
    received, ids, weights, handle = mode.dispatch(case, inputs, rows_to_send(inputs, fp8=fp8))
    arrived = mode.arrived(received, ids, weights)
    if not fp8 and max(case.num_tokens) <= 64:
        check_arrived(
            case, ranks.rank, arrived.hidden_states, arrived.topk_ids, arrived.topk_weights
        )
    out = mode.combine(experts(case, ranks.rank, arrived), handle)
    error = ranks.most(relative_error(out, expected_output(case, inputs)))
    limit = MAX_FP8_ERROR if fp8 else MAX_ERROR
    assert error <= limit, f"DeepEP normal, {case.name}, fp8={fp8}: error {error:.2e} > {limit}"
    return error


def run(ranks: Ranks, token_counts: tuple[int, ...] = (128, 1024, 4096)) -> None:
    """Probe, check, then time dispatch and combine at GLM's sizes."""
    mode = NormalMode()
    ranks.say("probe: normal buffer stands")
    run_case(ranks, mode, ExchangeCase(num_tokens=(8,) * ranks.world_size), fp8=False)
    ranks.say("probe: normal dispatch and combine are right for 8 tokens")
    idle = ExchangeCase(num_tokens=(0, *[17] * (ranks.world_size - 1)))
    run_case(ranks, mode, idle, fp8=False)
    ranks.say("normal mode: equal to the loops, also with a rank that has no tokens")
    for count in token_counts:
        case = ExchangeCase(num_tokens=(count,) * ranks.world_size)
        inputs = rank_inputs(case, ranks.rank, ranks.device)
        sent, total = ranks.most(rows_to_others(case, inputs, ranks.rank)), sum(case.num_tokens)
        for fp8 in (False, True):
            error = run_case(ranks, mode, case, fp8=fp8)
            # A row's scales travel with it, and its routing.
            row_bytes = case.hidden_size * (1 + 4 / 128 if fp8 else 2) + 12 * case.num_topk
            rows = rows_to_send(inputs, fp8=fp8)
            handle = mode.dispatch(case, inputs, rows)[3]
            for form, call in (
                ("deepep_normal", lambda c=case, i=inputs, r=rows: mode.dispatch(c, i, r)),
                ("deepep_normal_known", lambda r=rows, h=handle: mode.dispatch_again(r, h)),
            ):
                ranks.row(
                    op="dispatch",
                    form=form,
                    shape=case.name,
                    dtype="e4m3" if fp8 else "bf16",
                    **ranks.times_us(call, graph=form == "deepep_normal_known"),
                    bytes=int(sent * row_bytes),
                    **predicted(
                        "dispatch", case.world_size, total, copies="rank", row_bytes=row_bytes
                    ),
                    max_error=error,
                )
        received, ids, weights, handle = mode.dispatch(case, inputs, inputs.hidden_states)
        output = experts(case, ranks.rank, mode.arrived(received, ids, weights))
        ranks.row(
            op="combine",
            form="deepep_normal",
            shape=case.name,
            dtype="bf16",
            **ranks.times_us(lambda o=output, h=handle: mode.combine(o, h), graph=True),
            bytes=int(sent * case.hidden_size * 2),
            **predicted(
                "combine", case.world_size, total, copies="rank", row_bytes=2 * case.hidden_size
            ),
            max_error=run_case(ranks, mode, case, fp8=False),
        )
