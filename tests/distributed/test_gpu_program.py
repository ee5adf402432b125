"""The parts of the GPU program that need no GPU, over gloo: it must not fail there for want of a run here.

test_exchange       the portable exchange passes its own checks; the references see an error planted in it
test_index_scan     the divided scan selects as the whole one, with our paged kernels' torch forms
test_rows           rows hold what the table prints, beside the planner's figures
test_fp8_rows       the program's own quantisation of DeepEP's input, within e4m3's step
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

SIZES = {"hidden_size": 128, "num_experts": 16, "num_topk": 4}
ROWS = Path(__file__).parents[2] / ".cache" / "tests" / "gpu_program.jsonl"


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
