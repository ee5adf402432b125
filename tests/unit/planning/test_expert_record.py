"""Recorded experts: passes are told apart, and a step takes those of its own size.

test_passes               draft passes and dense layers are left out; rows are pairs over top-k
test_uneven_layers        a pass that was cut short is refused
test_nearest_pass         decode steps and prefill chunks take different passes; EP takes the busiest GPU
test_token_share          of the busiest GPU, by layer
test_copies               ranks that all count the same tokens
test_refused_files        no file, another file, another model, an empty record
test_row_of_a_gpu_server  what tests/gpu/serving writes is what `plan --compare` reads
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
import torch

from sglang_glm.planning.expert_record import (
    RecordedPass,
    RecordedPasses,
    mean_experts_hit,
    parse_passes,
    read_passes,
)
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.measured import predict
from sglang_glm.planning.measured_rows import parse_line
from sglang_glm.planning.released import load_config
from tests.gpu.serving import run

GLM = load_config("zai-org/GLM-5.3")
ONE, EP8 = ParallelLayout(), ParallelLayout(tp_size=8, ep_size=8)


def counts(*chosen: int) -> tuple[int, ...]:
    """Each of the 256 experts once that is named."""
    return tuple(int(expert in chosen) for expert in range(256))


def test_passes():
    dense, empty = [0] * 4, [[0] * 4] * 3
    verify = [dense, [6, 6, 0, 0], [3, 3, 3, 3]]
    parsed = parse_passes([verify, empty, [dense, [0, 1, 1, 0], [2, 0, 0, 0]]], 2)
    assert [item.rows for item in parsed] == [6, 1]
    assert parsed[0].counts == {1: (6, 6, 0, 0), 2: (3, 3, 3, 3)}
    assert mean_experts_hit(parsed, 6) == {1: 2, 2: 4}
    assert mean_experts_hit(parsed, 1) == {1: 2, 2: 1}
    assert mean_experts_hit(parsed, 2) == {}


def test_uneven_layers():
    with pytest.raises(ValueError, match=r"pass 0 .* routed 2 to 4"):
        parse_passes([[[2, 0], [2, 2]]], 2)


def test_nearest_pass():
    decode = RecordedPass(16, {3: counts(0, 1, 40), 4: counts(0, 32, 64, 96)})
    again = RecordedPass(16, {3: counts(5), 4: counts(5)})
    prefill = RecordedPass(8192, {3: counts(*range(256)), 4: counts(*range(0, 256, 2))})
    routing = RecordedPasses((decode, prefill, again))
    assert routing.experts_hit_per_gpu(GLM, ONE, 3, 20) == (3 + 1) / 2
    assert routing.experts_hit_per_gpu(GLM, EP8, 3, 20) == (2 + 1) / 2
    assert routing.experts_hit_per_gpu(GLM, EP8, 4, 1) == (1 + 1) / 2
    assert routing.experts_hit_per_gpu(GLM, ONE, 4, 5000) == 128
    # The MTP layer is not recorded.
    assert routing.experts_hit_per_gpu(GLM, ONE, 78, 8192) == (256 + 128) / 2
    assert "3 passes of 16 to 8,192 rows, 2 MoE layers" in routing.describe()


def test_token_share():
    busy = (8, *[0] * 31, *([1] + [0] * 31) * 7)
    routing = RecordedPasses((RecordedPass(15, {3: busy, 4: (1,) * 256}),))
    assert routing.token_share_per_gpu(GLM, EP8, 3) == 8 / 15
    assert routing.token_share_per_gpu(GLM, EP8, 4) == 1 / 8
    assert routing.token_share_per_gpu(GLM, ONE, 3) == 1


def record(path, num_layers=78, num_experts=256, rows=2, copies=1):
    content = torch.zeros(2, num_layers, num_experts, dtype=torch.int32)
    content[0, 3:, : 8 * rows] = copies
    torch.save({"rank": 0, "logical_count": content}, path)
    return path


def test_copies(tmp_path):
    path = record(tmp_path / "r.pt", copies=8)
    assert [item.rows for item in read_passes(path, GLM, EP8)] == [2]
    exchange = dataclasses.replace(EP8, attn_dp_size=8, moe_dispatch="all_to_all")
    path = record(tmp_path / "r.pt")
    assert [item.rows for item in read_passes(path, GLM, exchange)] == [2]


def test_refused_files(tmp_path):
    other = tmp_path / "other.pt"
    other.write_text("{}")
    missing = tmp_path / "none.pt"
    small = record(tmp_path / "small.pt", num_layers=8)
    idle = record(tmp_path / "idle.pt", copies=0)
    for path, said in (
        (missing, "is no file"),
        (other, "is no record"),
        (small, r"counts \[8, 256\] layers and experts, expected \[78, 256\]"),
        (idle, "holds no pass"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            read_passes(path, GLM, ONE)
        assert "\n" not in str(error.value)


def test_row_of_a_gpu_server():
    arguments = argparse.Namespace(weights="fp8", extra="--cuda-graph-bs-decode 4 16")
    ours = {"ms_per_step": 9.3, "prefill_s": 7.2, "tokens_per_step": 1.0, "memory_mib": None}
    known = {"30000x16": ours, "commit": "abc"}
    hit = {"experts_hit": {3: 20.5, 4: 31}, "prefill_experts_hit": {3: 32.0}}
    line = json.dumps(run.row_of(arguments, "rank8-mtp", "30000x16", {}, known, {"30000x16": hit}))
    step, prefill = parse_line(line, "here:1")
    assert (step.experts_hit, prefill.experts_hit) == ({3: 20.5, 4: 31.0}, {3: 32.0})
    assert "recorded for 2 MoE layers" in predict(step).routing
    # Without the third server the row says nothing, and the table that uniform routing was assumed.
    line = json.dumps(run.row_of(arguments, "rank8-mtp", "30000x16", {}, known, {}))
    assert all(row.experts_hit is None for row in parse_line(line, "here:1"))
