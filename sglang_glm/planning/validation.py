"""Predictions against measured server rows. `docs/planning.md` shows the table rendered here."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm.planning.measured import Prediction, predict
from sglang_glm.planning.measured_rows import MeasuredRow


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

FIGURES = {
    "decode step": "decode_step",
    "MTP round": "verify_round",
    "prefill": "prefill",
    "prefill, MTP": "mtp_prefill",
}
"""Name of a figure in the document to its op."""


def compare(row: ServerRow) -> list[tuple[str, Prediction]]:
    """Predict the four figures of a row, named as the document names them."""
    milliseconds = (row.decode_ms, row.round_ms, *row.prefill_ms)
    return [
        (
            figure,
            predict(
                MeasuredRow(
                    op=op,
                    batch=row.batch,
                    context_tokens=row.context_tokens,
                    ms_per_step=measured_ms,
                    experts_hit=row.experts_hit,
                    num_layers=row.num_layers,
                    n_routed_experts=row.n_routed_experts,
                )
            ),
        )
        for (figure, op), measured_ms in zip(FIGURES.items(), milliseconds, strict=True)
    ]


def render_table() -> str:
    """All rows as a Markdown table."""
    lines = [
        "| context x batch | figure | measured ms | expected ms | error | roofline ms |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for row in SERVER_ROWS:
        for figure, item in compare(row):
            digits = 2 if item.row.ms_per_step < 20 else 0
            lines.append(
                f"| {row.context_tokens:,} x {row.batch} | {figure} "
                f"| {item.row.ms_per_step:,.{digits}f} | {item.predicted_ms:,.{digits}f} "
                f"| {100 * item.error:+.0f}% | {item.roofline_ms:,.{digits}f} |"
            )
    return "\n".join(lines)
