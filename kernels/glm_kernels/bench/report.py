"""Render the committed rows: ``README.md`` (tables) and ``ratios.svg`` (our time over each peer's).

Of rows that repeat an op, shape, dtype and peer the last one counts.

    python -m glm_kernels.bench.report docs/bench
"""

from __future__ import annotations

import argparse
import json
import pathlib

from glm_kernels.bench.cases import FAMILIES

Row = dict[str, object]

HEADER = """# Measurements

Rendered from the `*.jsonl` rows beside this file by `python -m glm_kernels.bench.report
docs/bench`; do not edit. Times in µs: ten launches in a CUDA graph, median of seven replays, warm
L2; `cold` is one launch after the L2 was overwritten, the launch of its graph included. `floor` is
the larger of bytes over 4.27 TB/s and operations over 790 (bf16) or 1,580 (e4m3) TFLOP/s. A ratio
below 1 means that ours is faster; losses are shown like wins. Peer and ours ran in the same
process, one after the other. `gpu_serving.jsonl`, `gpu_accept.jsonl` and `cpu_serving.jsonl` are of whole servers:
[kernels.md](../kernels.md#whole-servers).
"""


def load(folder: pathlib.Path) -> dict[str, list[Row]]:
    """Rows of each family, the last of each key.

    Args:
        folder: holds ``FAMILY.jsonl``; rows of other benchmarks may lie beside them.

    Returns:
        Family name to rows in file order.
    """
    families = {}
    for path in (folder / f"{family}.jsonl" for family in sorted(FAMILIES)):
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        last = {(r["op"], r["shape"], r["dtype"], r.get("peer")): r for r in rows}
        families[path.stem] = list(last.values())
    return families


def table(rows: list[Row]) -> str:
    """Markdown table of rows."""
    lines = [
        "| op | shape | dtype | ours | cold | floor | peer | peer's | ratio | error |",
        "| --- | --- | --- | --: | --: | --: | --- | --: | --: | --: |",
    ]
    for r in rows:
        peer = f"{r['peer']} | {r['peer_time_us']} | {r['ratio']}" if "peer" in r else "- | - | -"
        lines.append(
            f"| {r['op']} | {r['shape']} | {r['dtype']} | {r['time_us']} | {r['cold_us']} | "
            f"{r['floor_us']} | {peer} | {r['max_error']:.1e} |"
        )
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """SVG bars of the ratios, a line at 1."""
    rows = [r for r in rows if "peer" in r]
    left, width, step, top = 420, 420, 18, 30
    widest = max(float(str(r["ratio"])) for r in rows)
    height = top + step * len(rows) + 10
    at_one = left + width / widest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{left}" y="16">time over the peer\'s (below 1: ours is faster)</text>',
    ]
    for i, r in enumerate(rows):
        ratio, y = float(str(r["ratio"])), top + step * i
        colour = "#2a7" if ratio <= 1 else "#c63"
        label = f"{r['op']} {r['shape']} {r['dtype']} / {r['peer']}"
        parts.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{label}</text>')
        bar = width * ratio / widest
        parts.append(f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{left + bar + 4:.1f}" y="{y + 12}">{ratio}</text>')
    parts.append(f'<path d="M{at_one:.1f} {top - 4}V{height}" stroke="#333" stroke-dasharray="3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(folder: pathlib.Path) -> None:
    """Write the tables and the plot into ``folder``."""
    families = load(folder)
    text = [HEADER, "![ratios](ratios.svg)\n"]
    for family, rows in families.items():
        first = rows[0]
        versions: dict[str, str] = {}
        for r in rows:
            versions.update(r["versions"])  # type: ignore[call-overload]
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        commits = sorted({str(r["commit"]) for r in rows})
        text.append(f"## {family}\n\n{first['gpu']}; {named}; commit {', '.join(commits)}.\n")
        text.append(table(rows) + "\n")
    (folder / "README.md").write_text("\n".join(text))
    (folder / "ratios.svg").write_text(plot([r for rows in families.values() for r in rows]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m glm_kernels.bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=pathlib.Path, help="holds the rows; is written to")
    given = parser.parse_args().folder
    if not any((given / f"{family}.jsonl").is_file() for family in FAMILIES):
        parser.error(f"{given} holds no rows; write some with python -m glm_kernels.bench")
    main(given)
