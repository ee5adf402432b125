"""Predictions beside measured rows: each field of a row changes what it must, and nothing is hidden."""

import dataclasses
import json
from pathlib import Path

import pytest

from sglang_glm.cli.main import main
from sglang_glm.planning import measured, validation
from sglang_glm.planning.measured import predict
from sglang_glm.planning.measured_rows import parse_line

BASE = {"op": "decode_step", "shape": "30000x8", "ms_per_step": 2.5, "experts_hit": 8}


def row(**changes):
    return parse_line(json.dumps(BASE | changes), "here:1")[0]


def test_reads_shapes_and_defaults():
    parsed = row(shape="128kx32", commit="ignored")
    assert (parsed.batch, parsed.context_tokens) == (32, 131_072)
    assert (parsed.n_routed_experts, parsed.num_layers, parsed.gpu) == (32, 7, "h200")
    assert row(experts_hit={"3": 5, "4": 7}).experts_hit == {3: 5.0, 4: 7.0}
    flags = "--speculative-num-steps 3 --kv-cache-dtype auto --kv-cache-dtype bfloat16"
    given = row(flags=f"{flags} --chunked-prefill-size 4096", heads=8)
    assert (given.mtp_steps, given.kv_cache_dtype, given.heads) == (3, "bfloat16", 8)
    assert given.chunked_prefill_size == 4096
    assert predict(given).predicted_ms != predict(row()).predicted_ms


def test_a_line_with_prefill_gives_two_figures():
    for op, name in (("decode_step", "prefill"), ("verify_round", "mtp_prefill")):
        step, prefill = parse_line(json.dumps(BASE | {"op": op, "prefill_s": 3.3}), "here:1")
        assert (step.op, prefill.op, prefill.ms_per_step) == (op, name, 3300.0)
        assert predict(prefill).predicted_ms > 100 * predict(step).predicted_ms


def test_the_committed_rows_are_read(capsys):
    path = Path(__file__).parents[3] / "docs" / "bench" / "gpu_serving.jsonl"
    assert main(["plan", "--compare", str(path), "--json"]) == 0
    items = json.loads(capsys.readouterr().out)
    assert len(items) >= len(path.read_text().splitlines()) >= 1
    # Every kernel at its ceiling is faster than any server.
    assert all(item["roofline_ms"] < item["measured_ms"] for item in items)
    assert main(["plan", "--compare", str(path)]) == 0
    table = capsys.readouterr().out.split("\n\n")[0]
    document = (path.parents[1] / "planning.md").read_text()
    assert table in document, "paste the table of plan --compare into docs/planning.md"


def test_a_line_is_predicted_as_the_committed_row():
    """A row of docs/planning.md, written as a line: 1 x 30,000 with 256 experts."""
    known = validation.SERVER_ROWS[1]
    for _, expected in validation.compare(known):
        measured_ms, op = expected.row.ms_per_step, expected.row.op
        got = predict(
            dataclasses.replace(
                row(n_routed_experts=256, shape="30000x1"), op=op, ms_per_step=measured_ms
            )
        )
        assert got == expected
    assert predict(row(shape="30000x1", n_routed_experts=256)).predicted_ms == pytest.approx(
        2.08, abs=0.005
    )


def test_recorded_experts_are_used_layer_by_layer():
    same = predict(row(experts_hit={"3": 8, "4": 8, "5": 8, "6": 8})).predicted_ms
    assert same == pytest.approx(predict(row()).predicted_ms)
    uneven = predict(row(experts_hit={"3": 2, "4": 14, "5": 8, "6": 8})).predicted_ms
    assert uneven == pytest.approx(same, rel=0.02)
    more = predict(row(experts_hit={"3": 8, "4": 8, "5": 8, "6": 32})).predicted_ms
    assert more > same * 1.01
    # One recorded layer stands for the others.
    assert predict(row(experts_hit={"3": 8})).predicted_ms == pytest.approx(same)
    assert "uniform" in predict(row(experts_hit=None)).routing


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('{"op": "decode_step"}', "lacks shape, ms_per_step"),
        (json.dumps(BASE | {"op": "train"}), "expected one of decode_step, verify_round"),
        (json.dumps(BASE | {"shape": "30000"}), "such as 30000x16"),
        (json.dumps(BASE | {"ms_per_step": 0}), "expected more than 0"),
        (json.dumps(BASE | {"ms_per_step": "fast"}), "ms_per_step 'fast', expected more than 0"),
        (json.dumps(BASE | {"experts_hit": "many"}), "experts_hit 'many'"),
        (json.dumps(BASE | {"experts_hit": {"three": 3}}), "'three' in experts_hit"),
        (json.dumps(BASE | {"tp": 1.5}), "1.5 in tp, expected a whole number"),
        (json.dumps(BASE | {"flags": "--speculative-num-steps five"}), "'five' in flags"),
        ("[1]", "no JSON object"),
    ],
)
def test_refuses_other_lines(line, said):
    with pytest.raises(ValueError, match=r"here:1") as error:
        parse_line(line, "here:1")
    assert said in str(error.value)


def test_command(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [BASE, BASE | {"op": "verify_round", "ms_per_step": 7.0}, BASE | {"ms_per_step": 25.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert main(["plan", "--compare", str(path), "--json"]) == 0
    items = json.loads(capsys.readouterr().out)
    assert [item["op"] for item in items] == ["decode_step", "verify_round", "decode_step"]
    for item in items:
        assert item["error"] == pytest.approx(item["predicted_ms"] / item["measured_ms"] - 1)
    assert main(["plan", "--compare", str(path)]) == 0
    text = capsys.readouterr().out
    far = sum(abs(item["error"]) > measured.LARGE_ERROR for item in items)
    assert far >= 1 and f"{far} of 3 rows are more than 30% off:\n" in text
    assert "\n  decode_step 30,000 x 8: host time" in text and "\nNot modelled: " in text
    assert "30,000 x 8" in text and "recorded: 8 experts hit" in text


def test_each_far_row_says_why(capsys, tmp_path):
    """Short prompts, long ones and steps are off for reasons of their own."""
    path = tmp_path / "rows.jsonl"
    rows = [
        BASE | {"shape": "1000x1", "ms_per_step": 2.07, "prefill_s": 0.031},
        BASE | {"shape": "120000x4", "ms_per_step": 2.43, "prefill_s": 16.2},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert main(["plan", "--compare", str(path)]) == 0
    text = capsys.readouterr().out
    assert "  prefill 1,000 x 1: one chunk is mostly launches" in text
    assert "  prefill 120,000 x 4: what a chunk costs more the longer the history" in text
    assert "  decode_step" not in text


def test_command_without_anything(tmp_path, capsys):
    assert main(["plan"]) == 1
    assert "got no model" in capsys.readouterr().err
    assert main(["plan", "--compare", str(tmp_path / "none.jsonl")]) == 1
    assert "is no file" in capsys.readouterr().err
