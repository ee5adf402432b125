"""Measured server rows beside their predictions: `sglang-glm plan --compare FILE.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_glm.config import GlmDsaConfig
from sglang_glm.planning import hardware, roofline
from sglang_glm.planning.experts import RecordedHits, RecordedHitsByLayer, UniformRouting
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.plan import Workload, build_plan
from sglang_glm.planning.released import RELEASED
from sglang_glm.planning.speculation import MtpShape
from sglang_glm.planning.traffic import ModelSetup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_glm.planning.experts import Routing
    from sglang_glm.planning.measured_rows import MeasuredRow
    from sglang_glm.planning.plan import Plan

LARGE_ERROR = 0.30
"""Share of the measurement beyond which the report says what is not modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One row beside its plan.

    Attributes:
        row: The measurement.
        predicted_ms: With the shares that kernels reach, or the roofline where none is known.
        roofline_ms: Every kernel at the ceiling.
        routing: The routing that was assumed, in words.
    """

    row: MeasuredRow
    predicted_ms: float
    roofline_ms: float
    routing: str

    @property
    def error(self) -> float:
        """Signed share of the measurement; negative when the prediction is too fast."""
        return self.predicted_ms / self.row.ms_per_step - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "op": self.row.op,
            "batch": self.row.batch,
            "context_tokens": self.row.context_tokens,
            "measured_ms": self.row.ms_per_step,
            "predicted_ms": self.predicted_ms,
            "roofline_ms": self.roofline_ms,
            "error": self.error,
            "routing": self.routing,
        }


def predict(row: MeasuredRow) -> Prediction:
    """Plan what was measured.

    Raises:
        ValueError: If the model or the GPU of the row is unknown, or it cannot be served so.
    """
    if row.model not in RELEASED:
        raise ValueError(f"plan: model is {row.model!r}, expected one of {', '.join(RELEASED)}")
    changes = {"num_hidden_layers": row.num_layers, "n_routed_experts": row.n_routed_experts}
    if row.heads is not None:
        changes |= {"num_attention_heads": row.heads, "num_key_value_heads": row.heads}
    config = GlmDsaConfig.from_hf(RELEASED[row.model] | changes)
    routing = _routing(row)
    gpu = hardware.find_gpu(row.gpu)
    steps = row.mtp_steps if row.op in ("verify_round", "mtp_prefill") else 0
    plan = build_plan(
        ModelSetup(
            config=config,
            layout=ParallelLayout(tp_size=row.tp),
            precision="fp8",
            kv_dtype="bf16" if row.kv_cache_dtype == "bfloat16" else "fp8_packed",
            routing=routing,
        ),
        gpu,
        Workload(
            context_tokens=row.context_tokens,
            concurrency=row.batch,
            chunk_tokens=row.chunked_prefill_size,
            mtp=MtpShape(num_steps=steps, num_draft_tokens=steps + 1) if steps else None,
        ),
    )
    known = roofline.known_rates(gpu) or roofline.IDEAL_RATES
    return Prediction(
        row=row,
        predicted_ms=_milliseconds(row, plan, known),
        roofline_ms=_milliseconds(row, plan, roofline.IDEAL_RATES),
        routing=routing.describe(),
    )


def _routing(row: MeasuredRow) -> Routing:
    if isinstance(row.experts_hit, dict):
        return RecordedHitsByLayer(row.experts_hit)
    return UniformRouting() if row.experts_hit is None else RecordedHits(row.experts_hit)


def _milliseconds(row: MeasuredRow, plan: Plan, rates: roofline.KernelRates) -> float:
    if row.op.endswith("prefill"):
        return row.batch * plan.prefill_us(rates) / 1e3
    phases = plan.mtp_round if row.op == "verify_round" else [plan.decode]
    return plan.phases_us(phases, rates) / 1e3


def render(predictions: Sequence[Prediction], not_modelled: Sequence[str]) -> str:
    """All rows as a table, and what the plan leaves out where it is far off.

    Args:
        predictions: At least one.
        not_modelled: What the plan does not know.
    """
    lines = [
        f"{'op':<14}{'tokens x requests':>20}{'measured ms':>13}{'predicted ms':>14}{'error':>8}"
        f"{'roofline ms':>13}"
    ]
    for item in predictions:
        shape = f"{item.row.context_tokens:,} x {item.row.batch}"
        lines.append(
            f"{item.row.op:<14}{shape:>20}{item.row.ms_per_step:>13,.2f}{item.predicted_ms:>14,.2f}"
            f"{100 * item.error:>+7.0f}%{item.roofline_ms:>13,.2f}"
        )
    lines += ["", *sorted({f"experts: {item.routing}" for item in predictions})]
    far = [item for item in predictions if abs(item.error) > LARGE_ERROR]
    if far:
        lines.append(f"{len(far)} of {len(predictions)} rows are more than {LARGE_ERROR:.0%} off:")
        # Configurations may share op and shape.
        lines += dict.fromkeys(
            f"  {item.row.op} {item.row.context_tokens:,} x {item.row.batch}: {_unmodelled(item.row)}"
            for item in far
        )
        lines.append(f"Not modelled: {'; '.join(not_modelled)}.")
    return "\n".join(lines)


def _unmodelled(row: MeasuredRow) -> str:
    """What most likely fills the gap of one row."""
    if not row.op.endswith("prefill"):
        return "host time between steps, or routing other than assumed"
    if row.context_tokens <= row.chunked_prefill_size:
        return "one chunk is mostly launches, host work and HTTP"
    return "what a chunk costs more the longer the history before it, see docs/planning.md"
