"""Draws a training log: ``python -m cookbook.train_tiny.curve log.jsonl curve.svg``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 640, 150, 48
_COLOURS = ("#1f6f8b", "#c1502e", "#5b8c3e", "#7a5195", "#b58900")

Line = tuple[str, list[tuple[float, float]]]
"""A label and its points."""


def read(path: Path) -> list[dict[str, Any]]:
    """Read the log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def validations(
    rows: list[dict[str, Any]], name: str, event: str = "validation"
) -> list[tuple[float, float]]:
    """Points of one measure of the sparse validations, by millions of tokens trained on."""
    points, tokens = [], 0.0
    for row in rows:
        tokens = row.get("tokens", tokens * 1e6) / 1e6
        if row.get("event") == event and row.get("sparse", True) and name in row:
            points.append((tokens, row[name]))
    return points


def _panel(title: str, lines: list[Line], low: float, high: float, top: int) -> list[str]:
    last = max((x for _, points in lines for x, _ in points), default=1.0) or 1.0

    def place(x: float, y: float) -> str:
        y = min(max(y, low), high)
        return f"{_MARGIN + x / last * _WIDTH:.1f},{top + _HEIGHT * (1 - (y - low) / (high - low)):.1f}"

    parts = [
        f'<text x="{_MARGIN}" y="{top - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{_MARGIN}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#999"/>',
        f'<text x="{_MARGIN - 6}" y="{top + 10}" text-anchor="end">{high:g}</text>',
        f'<text x="{_MARGIN - 6}" y="{top + _HEIGHT}" text-anchor="end">{low:g}</text>',
        f'<text x="{_MARGIN + _WIDTH}" y="{top + _HEIGHT + 16}" text-anchor="end">'
        f"{last:.0f} million tokens</text>",
    ]
    for number, (label, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        parts.append(
            f'<text x="{_MARGIN + _WIDTH + 10}" y="{top + 14 + 18 * number}" fill="{colour}">'
            f"{label}</text>"
        )
    return parts


def render(rows: list[dict[str, Any]]) -> str:
    """Draw the log.

    Args:
        rows: Its lines.

    Returns:
        An SVG document of three panels.
    """
    steps = [(row["tokens"] / 1e6, row["loss"]) for row in rows if "loss" in row]
    panels: list[tuple[str, list[Line], float, float]] = [
        ("Weighted cross-entropy", [("training", steps)], 0.0, 4.0),
        (
            "Codes right at 4,096 tokens, selection active",
            [
                ("names stated once", validations(rows, "code_4096")),
                ("several times", validations(rows, "latest_4096")),
                ("more than 64 times", validations(rows, "crowded_4096")),
                ("the same, wrong layout", validations(rows, "crowded_4096", "wrong layout")),
            ],
            0.0,
            1.0,
        ),
        (
            "Tokens a round of five drafts",
            [("accept length", validations(rows, "accept"))],
            1.0,
            6.0,
        ),
    ]
    body: list[str] = []
    for number, (title, lines, low, high) in enumerate(panels):
        body += _panel(title, lines, low, high, 30 + number * (_HEIGHT + 60))
    height = 30 + len(panels) * (_HEIGHT + 60)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 200}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    args.svg.write_text(render(read(args.log)))


if __name__ == "__main__":
    main()
