"""Measured server rows, one JSON object a line, as `docs/bench/gpu_serving.jsonl` has them.

`op`, `shape` and `ms_per_step` must be there:

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

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OPS = ("decode_step", "verify_round")
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
        **_model(values, where),
    )
    if not values.get("prefill_s"):
        return [step]
    name = "mtp_prefill" if op == "verify_round" else "prefill"
    prefill_ms = 1e3 * _positive(values["prefill_s"], "prefill_s", where)
    return [step, replace(step, op=name, ms_per_step=prefill_ms, experts_hit=prefill_hits)]


def _model(values: dict[str, Any], where: str) -> dict[str, Any]:
    """What a line says of the served model; what it leaves out is the default's."""
    given = {key: value for key, value in values.items() if value is not None}
    facts: dict[str, Any] = {
        key: _whole(given[key], key, where)
        for key in ("num_layers", "n_routed_experts", "tp", "heads")
        if key in given
    }
    return facts | {key: given[key] for key in ("model",) if key in given}


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
