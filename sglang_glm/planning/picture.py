"""A plan as a picture: memory of one GPU, and time of each term against the context."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_glm.planning import roofline
from sglang_glm.planning.plan import decode_phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_glm.planning.plan import Plan

_BAR_WIDTH = 60
_FIRST_CONTEXT_TOKENS = 1024
_SHORTEST_SHOWN_MS = 1e-3


def has_matplotlib() -> bool:
    """Whether a drawn picture is possible here."""
    return importlib.util.find_spec("matplotlib") is not None


def memory_parts_bytes(plan: Plan) -> list[tuple[str, float]]:
    """Parts of one GPU's memory in the order of the bar; they sum to its capacity."""
    parts = plan.memory
    routed = parts.weights["routed_experts"]
    return [
        ("routed experts", routed),
        ("other weights", parts.weights_bytes - routed),
        ("KV cache", parts.kv_pool_bytes),
        ("reserve", parts.reserve_bytes),
        ("driver", parts.driver_bytes),
    ]


def context_points_tokens(plan: Plan) -> list[int]:
    """Powers of two from 1,024 to the model's positions."""
    points = [_FIRST_CONTEXT_TOKENS]
    while points[-1] * 2 <= plan.setup.config.max_position_embeddings:
        points.append(points[-1] * 2)
    return points


def decode_us_by_term(plan: Plan, contexts: Sequence[int]) -> dict[str, list[float]]:
    """Roofline of each term of a decode step at each context, collectives summed."""
    series: dict[str, list[float]] = {}
    for position, context_tokens in enumerate(contexts):
        workload = replace(plan.workload, context_tokens=context_tokens)
        phase = decode_phase(plan.setup, workload)
        timed = plan.timed(phase, roofline.IDEAL_RATES)
        for number, term in enumerate(timed):
            name = term.name if number < len(phase.terms) else "collectives"
            values = series.setdefault(name, [0.0] * len(contexts))
            values[position] += term.time_us
    return series


def text_picture(plan: Plan) -> str:
    """Both panels in characters."""
    lines = ["memory of one GPU"]
    for name, size in memory_parts_bytes(plan):
        lines.append(_bar(name, size, plan.memory.gpu_bytes, f"{size / 1e9:,.1f} GB"))
    contexts = context_points_tokens(plan)
    series = decode_us_by_term(plan, contexts)
    totals = [sum(values[i] for values in series.values()) for i in range(len(contexts))]
    lines.append("")
    lines.append("decode step, roofline, and its longest term")
    for position, context_tokens in enumerate(contexts):
        longest = max(series, key=lambda name: series[name][position])
        label = f"{totals[position] / 1e3:,.2f} ms, {longest}"
        lines.append(_bar(f"{context_tokens:,}", totals[position], totals[-1], label))
    return "\n".join(lines)


def _bar(name: str, value: float, whole: float, label: str) -> str:
    filled = round(_BAR_WIDTH * value / whole)
    return f"{name:>16} |{'#' * filled}{' ' * (_BAR_WIDTH - filled)}| {label}"


def check_path(path: Path) -> None:
    """Refuse what cannot be drawn to, before anything is computed.

    Raises:
        ValueError: For another suffix, or a folder that is not there.
    """
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"plan: picture is {str(path)!r}, expected a name ending in .svg or .png")
    if not path.parent.is_dir():
        raise ValueError(f"plan: picture is {str(path)!r}, but there is no folder {path.parent}")


def draw(plan: Plan, model: str, path: Path) -> None:
    """Write an SVG or PNG (by suffix, see `check_path`) with both panels; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    memory_axes, time_axes = figure.subplots(2, 1, height_ratios=(1, 4))
    left = 0.0
    for name, size in memory_parts_bytes(plan):
        memory_axes.barh([0], [size / 1e9], left=left, label=f"{name} {size / 1e9:.1f} GB")
        left += size / 1e9
    memory_axes.set_xlim(0, left)
    memory_axes.set_yticks([])
    memory_axes.set_xlabel(f"GB of one {plan.gpu.name}")
    memory_axes.set_title(f"{model}, {plan.workload.concurrency} requests")
    memory_axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    contexts = context_points_tokens(plan)
    markers = "osv^<>DXPh*"
    for number, (name, values) in enumerate(decode_us_by_term(plan, contexts).items()):
        milliseconds = [value / 1e3 for value in values]
        marker = markers[number % len(markers)]
        time_axes.plot(contexts, milliseconds, marker=marker, color=f"C{number}", label=name)
    time_axes.set_xscale("log", base=2)
    time_axes.set_xticks(contexts[::2], [f"{tokens // 1024:,}k" for tokens in contexts[::2]])
    time_axes.set_yscale("log")
    time_axes.set_ylim(bottom=_SHORTEST_SHOWN_MS)
    time_axes.set_xlabel("context, tokens")
    time_axes.set_ylabel("ms of a decode step (roofline)")
    time_axes.grid(alpha=0.3)
    time_axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path)
