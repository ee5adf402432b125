"""DeepEP's low-latency mode (decode): a probe, then row by row, then timed; BF16 and FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.gpu.parallel.deepep_normal_part import MAX_FP8_ERROR, ids_of
from tests.gpu.parallel.exchange_case import (
    ExchangeCase,
    RankInputs,
    expected_output,
    expert_scales,
    pairs_to_others,
    rank_inputs,
    relative_error,
)
from tests.gpu.parallel.fp8_blocks import dequantize_rows
from tests.gpu.parallel.portable_part import MAX_ERROR
from tests.gpu.parallel.prediction import predicted

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks

CAPACITY = 128
_LOW_32_BITS = (1 << 32) - 1


class LowLatencyMode:
    """Dispatch and combine of one buffer."""

    def __init__(self, case: ExchangeCase) -> None:
        import deep_ep

        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            CAPACITY, case.hidden_size, case.world_size, case.num_experts
        )
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD,
            0,
            size,
            low_latency_mode=True,
            num_qps_per_rank=case.num_local_experts,
        )

    def dispatch(self, case: ExchangeCase, inputs: RankInputs, *, fp8: bool) -> tuple:
        """Send; returns rows by local expert (a pair with scales in FP8), counts and the handle."""
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            inputs.hidden_states, ids_of(inputs), CAPACITY, case.num_experts, use_fp8=fp8
        )
        return rows, counts, handle

    def combine(self, output: torch.Tensor, inputs: RankInputs, handle: tuple) -> torch.Tensor:
        """Weighted sum at the tokens' rank."""
        return self.buffer.low_latency_combine(output, ids_of(inputs), inputs.topk_weights, handle)[
            0
        ]


def values(rows) -> torch.Tensor:
    """`[num_local_experts, capacity * ranks, hidden]` fp32 of what arrived."""
    return dequantize_rows(*rows) if isinstance(rows, tuple) else rows.float()


def check_rows(
    ranks: Ranks, case: ExchangeCase, rows: torch.Tensor, counts: torch.Tensor, handle: tuple
) -> float:
    """Hold every arrived row against its source.

    Returns:
        The rows' relative error: 0 for BF16, FP8's rounding otherwise.

    Raises:
        AssertionError: an expert received other tokens than those that chose it.
    """
    source_tokens, ranges = handle[0].cpu(), handle[1].cpu()
    every = [rank_inputs(case, rank, ranks.device) for rank in range(case.world_size)]
    squared, total = 0.0, 0.0
    for local in range(case.num_local_experts):
        expert = ranks.rank * case.num_local_experts + local
        arrived = 0
        for source, inputs in enumerate(every):
            packed = int(ranges[local, source])
            first, count = packed >> 32, packed & _LOW_32_BITS
            arrived += count
            tokens = source_tokens[local, first : first + count].long()
            chose = (inputs.topk_ids == expert).any(dim=1).nonzero()[:, 0].cpu()
            assert torch.equal(tokens.sort().values, chose), f"expert {expert}: other tokens"
            sent = inputs.hidden_states[tokens.to(ranks.device)].float()
            squared += float((rows[local, first : first + count] - sent).square().sum())
            total += float(sent.square().sum())
        assert int(counts[local]) == arrived, f"expert {expert}: {int(counts[local])} rows counted"
    return (squared / total) ** 0.5 if total else 0.0


def run_case(
    ranks: Ranks, mode: LowLatencyMode, case: ExchangeCase, *, fp8: bool, by_row: bool = False
) -> tuple[float, float | None]:
    """Exchange once; returns the output's relative error and, with `by_row`, the rows'."""
    inputs = rank_inputs(case, ranks.rank, ranks.device)
    rows, counts, handle = mode.dispatch(case, inputs, fp8=fp8)
    arrived = values(rows)
    row_error = check_rows(ranks, case, arrived, counts, handle) if by_row else None
    out = mode.combine(expert_output(ranks, case, arrived), inputs, handle)
    error = ranks.most(relative_error(out, expected_output(case, inputs)))
    limit = MAX_FP8_ERROR if fp8 else MAX_ERROR
    assert error <= limit, (
        f"DeepEP low latency, {case.name}, fp8={fp8}: error {error:.2e} > {limit}"
    )
    assert fp8 or not row_error, f"BF16 rows changed on the way: {row_error:.2e}"
    return error, None if row_error is None else ranks.most(row_error)


def expert_output(ranks: Ranks, case: ExchangeCase, arrived: torch.Tensor) -> torch.Tensor:
    """Each local expert's rows, unweighted: the combine applies the weights."""
    first = ranks.rank * case.num_local_experts
    scales = expert_scales(case, ranks.device)[first : first + case.num_local_experts]
    return (arrived * scales[:, None, None]).bfloat16()


def run(ranks: Ranks, token_counts: tuple[int, ...] = (8, 32, 128)) -> None:
    """Probe, check, then time dispatch and combine at GLM's sizes."""
    probe = ExchangeCase(num_tokens=(8,) * ranks.world_size)
    mode = LowLatencyMode(probe)
    ranks.say("probe: low-latency buffer stands")
    run_case(ranks, mode, probe, fp8=False, by_row=True)
    ranks.say("probe: low-latency dispatch and combine are right for 8 tokens")
    idle = ExchangeCase(num_tokens=(0, *[17] * (ranks.world_size - 1)))
    run_case(ranks, mode, idle, fp8=False, by_row=True)
    ranks.say("low latency: every row accounted for, also with a rank that has no tokens")
    for count in token_counts:
        case = ExchangeCase(num_tokens=(count,) * ranks.world_size)
        inputs = rank_inputs(case, ranks.rank, ranks.device)
        sent, total = ranks.most(pairs_to_others(case, inputs, ranks.rank)), sum(case.num_tokens)
        for fp8 in (False, True):
            error, row_error = run_case(
                ranks, mode, case, fp8=fp8, by_row=count == token_counts[-1]
            )
            row_bytes = case.hidden_size * (1 + 4 / 128 if fp8 else 2) + 16
            ranks.row(
                op="dispatch",
                form="deepep_low_latency",
                shape=case.name,
                dtype="e4m3" if fp8 else "bf16",
                **ranks.times_us(
                    lambda c=case, i=inputs, f=fp8: mode.dispatch(c, i, fp8=f), graph=True
                ),
                bytes=int(sent * row_bytes),
                **predicted(
                    "dispatch", case.world_size, total, copies="expert", row_bytes=row_bytes
                ),
                max_error=error,
                row_error=row_error,
            )
        rows, _, handle = mode.dispatch(case, inputs, fp8=False)
        output = expert_output(ranks, case, values(rows))
        ranks.row(
            op="combine",
            form="deepep_low_latency",
            shape=case.name,
            dtype="bf16",
            **ranks.times_us(
                lambda o=output, i=inputs, h=handle: mode.combine(o, i, h), graph=True
            ),
            bytes=int(sent * case.hidden_size * 2),
            **predicted(
                "combine", case.world_size, total, copies="expert", row_bytes=2 * case.hidden_size
            ),
            max_error=run_case(ranks, mode, case, fp8=False)[0],
        )
    # What a server does between a prefill and a decode step.
    mode.buffer.clean_low_latency_buffer(CAPACITY, probe.hidden_size, probe.num_experts)
    torch.cuda.synchronize()
    ranks.say("probe: the buffers were cleaned")
