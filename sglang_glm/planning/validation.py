"""Predictions against measured server rows. `docs/planning.md` shows the table rendered here."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm.config import GlmDsaConfig
from sglang_glm.planning import hardware, roofline
from sglang_glm.planning.experts import RecordedHits
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.plan import Workload, build_plan
from sglang_glm.planning.released import RELEASED
from sglang_glm.planning.speculation import MtpShape
from sglang_glm.planning.traffic import ModelSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """One measured configuration of a server with fewer layers and dummy FP8 weights.

    Attributes:
        batch: Requests at once, and prompts of the prefill figures.
        num_layers: Decoder layers served; the first three are dense.
        n_routed_experts: Experts of each MoE layer.
        experts_hit: Experts hit per MoE layer and step.
        decode_ms: Per token without MTP.
        round_ms: Per verify round, EAGLE 5-1-6.
        prefill_ms: All prompts, without and with MTP.
    """

    context_tokens: int
    batch: int
    num_layers: int
    n_routed_experts: int
    experts_hit: float
    decode_ms: float
    round_ms: float
    prefill_ms: tuple[float, float]


def _row(
    context_tokens: int,
    batch: int,
    decode_ms: float,
    round_ms: float,
    prefill_ms: tuple[float, float],
) -> ServerRow:
    # Experts hit were not recorded. Random weights route almost every token alike (batch 16 is as
    # fast as batch 1), so the rows are predicted with the fewest a token can choose.
    return ServerRow(
        context_tokens=context_tokens,
        batch=batch,
        num_layers=7,
        n_routed_experts=256,
        experts_hit=8,
        decode_ms=decode_ms,
        round_ms=round_ms,
        prefill_ms=prefill_ms,
    )


SERVER_ROWS = (
    _row(1_000, 1, 2.07, 6.40, (31, 59)),
    _row(30_000, 1, 2.80, 6.24, (422, 505)),
    _row(30_000, 8, 2.92, 7.15, (3321, 3992)),
    _row(30_000, 16, 2.79, 8.82, (6716, 7983)),
    _row(120_000, 4, 2.43, 6.42, (8577, 10205)),
)
"""SGLang 0.5.23 on one H200, FP8 KV rows, flashmla_kv. The first row fits the fixed times."""

MTP_SHAPE = MtpShape(num_steps=5, num_draft_tokens=6)
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One predicted figure beside its measurement, in milliseconds."""

    row: ServerRow
    figure: str
    measured_ms: float
    predicted_ms: float
    roofline_ms: float

    @property
    def error(self) -> float:
        """Signed share of the measurement; negative when the prediction is too fast."""
        return self.predicted_ms / self.measured_ms - 1.0


def compare(row: ServerRow) -> list[Comparison]:
    """Predict the four figures of a row."""
    released = RELEASED["zai-org/GLM-5.3"]
    config = GlmDsaConfig.from_hf(
        released | {"num_hidden_layers": row.num_layers, "n_routed_experts": row.n_routed_experts}
    )
    setup = ModelSetup(
        config=config,
        layout=ParallelLayout(),
        precision="fp8",
        kv_dtype="fp8_packed",
        routing=RecordedHits(row.experts_hit),
    )
    plans = [
        build_plan(
            setup,
            hardware.find_gpu("h200"),
            Workload(
                context_tokens=row.context_tokens,
                concurrency=row.batch,
                chunk_tokens=CHUNK_TOKENS,
                mtp=mtp,
            ),
        )
        for mtp in (None, MTP_SHAPE)
    ]
    results = []
    for figure, plan, phases, measured_ms in (
        ("decode step", plans[0], [plans[0].decode], row.decode_ms),
        ("MTP round", plans[1], plans[1].mtp_round, row.round_ms),
        ("prefill", plans[0], None, row.prefill_ms[0]),
        ("prefill, MTP", plans[1], None, row.prefill_ms[1]),
    ):
        predicted_us, ideal_us = (
            row.batch * plan.prefill_us(rates) if phases is None else plan.phases_us(phases, rates)
            for rates in (roofline.HOPPER_RATES, roofline.IDEAL_RATES)
        )
        results.append(
            Comparison(
                row=row,
                figure=figure,
                measured_ms=measured_ms,
                predicted_ms=predicted_us / 1e3,
                roofline_ms=ideal_us / 1e3,
            )
        )
    return results


def render_table() -> str:
    """All rows as a Markdown table."""
    lines = [
        "| context x batch | figure | measured ms | expected ms | error | roofline ms |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for row in SERVER_ROWS:
        for item in compare(row):
            digits = 2 if item.measured_ms < 20 else 0
            lines.append(
                f"| {row.context_tokens:,} x {row.batch} | {item.figure} "
                f"| {item.measured_ms:,.{digits}f} | {item.predicted_ms:,.{digits}f} "
                f"| {100 * item.error:+.0f}% | {item.roofline_ms:,.{digits}f} |"
            )
    return "\n".join(lines)
