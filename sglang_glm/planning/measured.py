"""Measured server rows beside their predictions: `sglang-glm plan --compare FILE.jsonl`.

A row is one JSON object a line, as `docs/bench/gpu_serving.jsonl` has them. `op`, `shape` and
`ms_per_step` must be there:

* `op`: `decode_step` (one token without drafts) or `verify_round` (verify, draft extend and draft
  steps);
* `shape`: tokens of context and requests, `30000x16` or `128kx32`;
* `ms_per_step`: milliseconds of the op;
* `prefill_s`: seconds of all prompts from nothing, which gives a second figure;
* `experts_hit`: distinct experts a MoE layer and step, as recorded: a number, or one by layer id.
  Without it uniform routing is assumed and the table says so;
* `prefill_experts_hit`: the same a prefill chunk; without it `experts_hit` where that is one number,
  else uniform routing;
* `flags`: of the server; draft steps, cache dtype and prefill chunk are read from it;
* `heads`: query heads of the served config, where they are not the model's;
* `model` (zai-org/GLM-5.3), `num_layers` (7), `n_routed_experts` (32), `tp` (1).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
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
    from pathlib import Path

    from sglang_glm.planning.experts import Routing
    from sglang_glm.planning.plan import Plan

OPS = ("decode_step", "verify_round")
LARGE_ERROR = 0.30
"""Share of the measurement beyond which the report says what is not modelled."""

_SHAPE = re.compile(r"^(\d+)([kKmM]?)x(\d+)$")
_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured step.

    Attributes:
        op: One of `OPS`, or `prefill`, with drafts `mtp_prefill`.
        batch: Requests at once.
        context_tokens: Of each.
        ms_per_step: Measured.
        experts_hit: Per MoE layer and step: one number, by layer id, or `None` if not recorded.
        num_layers: Decoder layers served.
        n_routed_experts: Of each MoE layer.
        mtp_steps: Draft steps of a round.
        heads: Query heads, `None` for the model's.
    """

    op: str
    batch: int
    context_tokens: int
    ms_per_step: float
    experts_hit: float | dict[int, float] | None = None
    model: str = "zai-org/GLM-5.3"
    gpu: str = "h200"
    tp: int = 1
    num_layers: int = 7
    n_routed_experts: int = 32
    mtp_steps: int = 5
    kv_cache_dtype: str = "fp8_e4m3"
    chunked_prefill_size: int = 8192
    heads: int | None = None


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


def read_rows(path: Path) -> list[MeasuredRow]:
    """Read a file of rows.

    Raises:
        ValueError: Naming the line that is not a row, or the file that holds none.
    """
    if not path.is_file():
        raise ValueError(f"plan: {path} is no file, expected measured rows as JSON lines")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"plan: {path} is no text, expected measured rows as JSON lines") from None
    rows = [
        row
        for number, line in enumerate(lines, start=1)
        if line.strip()
        for row in parse_line(line, f"{path.name}:{number}")
    ]
    if not rows:
        raise ValueError(f"plan: {path} holds no rows, expected JSON lines")
    return rows


def parse_line(line: str, where: str) -> list[MeasuredRow]:
    """Read one line: its step, and its prefill where it has one.

    Args:
        line: JSON, as the module describes it; other keys are passed over.
        where: File and line, for the error.

    Raises:
        ValueError: Naming the key.
    """
    try:
        values: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: {where} is not JSON ({error.msg})") from None
    if not isinstance(values, dict):
        raise ValueError(f"plan: {where} is no JSON object with op, shape and ms_per_step")
    missing = [key for key in ("op", "shape", "ms_per_step") if key not in values]
    if missing:
        raise ValueError(f"plan: {where} lacks {', '.join(missing)}")
    op = values["op"]
    if op not in OPS:
        raise ValueError(f"plan: {where} has op {op!r}, expected one of {', '.join(OPS)}")
    shape = _SHAPE.match(str(values["shape"]))
    if shape is None or int(shape[1]) < 1 or int(shape[3]) < 1:
        raise ValueError(
            f"plan: {where} has shape {values['shape']!r}, expected tokens and requests such as "
            "30000x16 or 128kx32"
        )
    hits, prefill_hits = (
        _hits(values, key, where) for key in ("experts_hit", "prefill_experts_hit")
    )
    if prefill_hits is None and not isinstance(hits, dict):
        prefill_hits = hits
    flags = str(values.get("flags", "")).split()
    step = MeasuredRow(
        op=op,
        batch=int(shape[3]),
        context_tokens=int(shape[1]) * _FACTORS[shape[2].lower()],
        ms_per_step=_positive(values["ms_per_step"], "ms_per_step", where),
        experts_hit=hits,
        mtp_steps=_whole(_flag(flags, "--speculative-num-steps", "5"), "flags", where),
        kv_cache_dtype=_flag(flags, "--kv-cache-dtype", "fp8_e4m3"),
        chunked_prefill_size=_whole(_flag(flags, "--chunked-prefill-size", "8192"), "flags", where),
        **{
            key: _whole(values[key], key, where)
            for key in ("num_layers", "n_routed_experts", "tp", "heads")
            if values.get(key) is not None
        },
        **({"model": values["model"]} if values.get("model") is not None else {}),
    )
    if not values.get("prefill_s"):
        return [step]
    name = "mtp_prefill" if op == "verify_round" else "prefill"
    prefill_ms = 1e3 * _positive(values["prefill_s"], "prefill_s", where)
    return [step, replace(step, op=name, ms_per_step=prefill_ms, experts_hit=prefill_hits)]


def _hits(values: dict[str, Any], key: str, where: str) -> float | dict[int, float] | None:
    hits = values.get(key)
    if isinstance(hits, dict):
        return {
            _whole(layer, key, where): _positive(hit, key, where) for layer, hit in hits.items()
        }
    return None if hits is None else _positive(hits, key, where)


def _positive(value: object, key: str, where: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError(f"plan: {where} has {key} {value!r}, expected more than 0")
    return number


def _whole(value: object, key: str, where: str) -> int:
    if not str(value).isdecimal():
        raise ValueError(f"plan: {where} has {value!r} in {key}, expected a whole number")
    return int(str(value))


def _flag(words: Sequence[str], name: str, default: str) -> str:
    """The last value of a flag in a command line."""
    places = [index for index, word in enumerate(words[:-1]) if word == name]
    return words[places[-1] + 1] if places else default


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
