"""The parts of the GPU program that need no GPU, over gloo: it must not fail there for want of a run here.

test_exchange       the portable exchange passes its own checks; the references see an error planted in it
test_index_scan     the divided scan selects as the whole one, with our paged kernels' torch forms
test_rows           rows hold what the table prints, beside the planner's figures
test_fp8_rows       the program's own quantisation of DeepEP's input, within e4m3's step
test_published      docs/parallel.md says what the committed rows say, and these are right and whole
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.parallel import collectives_part, exchange_case, index_scan_part, portable_part
from tests.gpu.parallel.fp8_blocks import dequantize_rows, quantize_rows
from tests.gpu.parallel.measure import read_rows, table
from tests.gpu.parallel.ranks import Ranks
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 128, "num_experts": 16, "num_topk": 4}
ROWS = ROOT / ".cache" / "tests" / "gpu_program.jsonl"


def program(rank: int) -> dict:
    ranks = Ranks(rank=rank, world_size=2, device="cpu", rows_path=ROWS, commit="tried")
    portable_part.check(ranks, **SIZES)
    case = exchange_case.ExchangeCase(num_tokens=(5, 5), **SIZES)
    inputs = exchange_case.rank_inputs(case, rank, "cpu")
    inputs.topk_weights[0, 0] += 0.5
    planted = exchange_case.relative_error(
        exchange_case.expected_output(case, exchange_case.rank_inputs(case, rank, "cpu")),
        exchange_case.expected_output(case, inputs),
    )
    index_scan_part.run(ranks, ((3, 3, 4300), (1, 1, 2200)))
    collectives_part.run(ranks, (1024,))
    return {"planted": planted}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.unlink(missing_ok=True)
    return run_ranks(program)


def test_exchange(found: list[dict]) -> None:
    assert all(rank["planted"] > portable_part.MAX_ERROR for rank in found)


def test_index_scan(found: list[dict]) -> None:
    scans = [row for row in read_rows(ROWS) if row["op"] == "index_scan"]
    assert [(row["form"], row["max_error"]) for row in scans] == [
        ("by_history", 0),
        ("by_request", 0),
        ("by_history", 0),
    ]


def test_rows(found: list[dict]) -> None:
    rows = read_rows(ROWS)
    assert {row["op"] for row in rows} >= {"index_scan", "all_gather", "all_to_all"}
    assert len(table(rows).splitlines()) == len(rows) + 1
    assert all(json.dumps(row) for row in rows)


def test_fp8_rows() -> None:
    rows = torch.randn(7, 256) * torch.tensor([1e-6, 1e-3, 1, 10, 100, 1e4, 0])[:, None]
    restored = dequantize_rows(*quantize_rows(rows))
    assert ((restored - rows).abs() <= rows.abs().amax(1, keepdim=True) / 16 + 1e-6).all()


def scan_line(forms: dict[str, dict]) -> str:
    """A line of the document's table of divided scans."""
    history = forms["by_history"]
    shape = history["shape"].split(", ")[1]  # as in "8x32768 n6"
    requests, length = map(int, shape.split()[0].split("x"))
    cells = [f"{requests} of {shape.split('n')[1]} \u00d7 {length:,}", f"{history['whole_us']:.0f}"]
    for form in ("by_history", "by_request"):
        if row := forms.get(form):
            saved = f"{row['saved_us']:.0f} ({row['predicted_saved_us']:.0f})"
            cells += [f"{row['time_us']:.0f}", saved.replace("-", "\u2212")]
        else:
            cells += ["", ""]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def exchange_cells(rows: list[dict], form: str, tokens: int) -> str:
    """The end of a line of the document's table of exchanges."""
    known = {(r["op"], r["dtype"]): r for r in rows if r["form"] == form}
    cells = []
    for key in (("dispatch", "bf16"), ("dispatch", "e4m3"), ("combine", "bf16")):
        row = known.get(key)
        cells.append(f"{row['time_us']:,.0f} ({row['predicted_us']:.0f})" if row else "")
    return f"| {tokens:,} | {' | '.join(cells)} |".replace("|  |", "| |")


def test_published() -> None:
    text = (ROOT / "docs" / "parallel.md").read_text()
    rows = read_rows(ROOT / "docs" / "bench" / "parallel.jsonl")
    by_shape: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        by_shape.setdefault((row["op"], row["shape"]), []).append(row)
    for (op, shape), found in by_shape.items():
        if op == "index_scan":
            assert all(row["max_error"] == 0 for row in found)
            assert scan_line({row["form"]: row for row in found}) in text
        elif op == "dispatch":
            tokens = int(shape.split(", ")[1].split()[0])
            exchange = found + by_shape["combine", shape]
            for form in {row["form"] for row in exchange}:
                shown = form != "portable" or tokens in (8, 1024, 4096)
                assert not shown or exchange_cells(exchange, form, tokens) in text, (form, tokens)
            assert all(
                row["max_error"] < (0.03 if row["dtype"] == "e4m3" else portable_part.MAX_ERROR)
                for row in exchange
            )
        elif op == "serve":
            assert all(f"{row['ms_per_step']:.1f} |" in text for row in found)
