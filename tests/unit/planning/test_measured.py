"""Predictions beside measured rows: each field of a row changes what it must, and nothing is hidden."""

import json

import pytest

from sglang_glm.cli.main import main
from sglang_glm.planning import measured, validation
from sglang_glm.planning.measured import parse_row, predict

BASE = {"op": "decode", "shape": "8x30000", "ms_per_step": 2.5, "experts_hit": 8}


def row(**changes):
    return parse_row(json.dumps(BASE | changes), "here:1")


def test_reads_shapes_and_defaults():
    parsed = row(shape="32x128k n6", commit="ignored")
    assert (parsed.batch, parsed.context_tokens) == (32, 131_072)
    assert (parsed.n_routed_experts, parsed.num_layers, parsed.gpu) == (32, 7, "h200")
    assert row(experts_hit={"3": 5, "4": 7}).experts_hit == {3: 5.0, 4: 7.0}


def test_a_line_is_predicted_as_the_committed_row():
    """A row of docs/planning.md, written as a line: 1 x 30,000 with 256 experts."""
    known = validation.SERVER_ROWS[1]
    for _, expected in validation.compare(known):
        measured_ms, op = expected.row.ms_per_step, expected.row.op
        got = predict(row(op=op, shape="1x30000", ms_per_step=measured_ms, n_routed_experts=256))
        assert got == expected
    assert predict(row(shape="1x30000", n_routed_experts=256)).predicted_ms == pytest.approx(
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
        ('{"op": "decode"}', "lacks shape, ms_per_step"),
        (json.dumps(BASE | {"op": "train"}), "expected one of decode, mtp_round"),
        (json.dumps(BASE | {"shape": "30000"}), "such as 8x30000"),
        (json.dumps(BASE | {"ms_per_step": 0}), "expected more than 0"),
    ],
)
def test_refuses_other_lines(line, said):
    with pytest.raises(ValueError, match=r"here:1") as error:
        parse_row(line, "here:1")
    assert said in str(error.value)


def test_command(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [BASE, BASE | {"op": "mtp_round", "ms_per_step": 7.0}, BASE | {"ms_per_step": 25.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert main(["plan", "--compare", str(path), "--json"]) == 0
    items = json.loads(capsys.readouterr().out)
    assert [item["op"] for item in items] == ["decode", "mtp_round", "decode"]
    for item in items:
        assert item["error"] == pytest.approx(item["predicted_ms"] / item["measured_ms"] - 1)
    assert main(["plan", "--compare", str(path)]) == 0
    text = capsys.readouterr().out
    far = sum(abs(item["error"]) > measured.LARGE_ERROR for item in items)
    assert far >= 1 and f"{far} of 3 rows are more than 30% off. Not modelled: " in text
    assert "8 x 30,000" in text and "recorded: 8 experts hit" in text


def test_command_without_anything(tmp_path, capsys):
    assert main(["plan"]) == 1
    assert "got no model" in capsys.readouterr().err
    assert main(["plan", "--compare", str(tmp_path / "none.jsonl")]) == 1
    assert "is no file" in capsys.readouterr().err
