"""The golden entries are what transformers still computes, and a wrong server would fail them.

test_entries_are_complete      a file per recipe, all small, none with an excuse
test_weights_are_unchanged     the writer still makes the checkpoints that the entries name
test_regenerates               two entries, from scratch
test_comparison_can_fail       a wrong log-probability, token or NaN does not pass
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sglang_glm.checkpoint.writer import read_manifest, write_checkpoint
from sglang_glm.verification.golden import TOP, GoldenEntry, compare_golden, load_entry
from tests.golden import make_golden
from tests.support.golden import right_answer

HERE = Path(__file__).parent

NAMES = sorted(make_golden.RECIPES)


def entry_of(name: str) -> GoldenEntry:
    return load_entry(HERE / f"{name}.safetensors")


def test_entries_are_complete() -> None:
    files = sorted(HERE.glob("*.safetensors"))
    assert [path.stem for path in files] == NAMES
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for name in NAMES:
        entry, recipe = entry_of(name), make_golden.RECIPES[name]
        assert entry.spec == recipe.spec and entry.formats == recipe.formats
        assert entry.prompt_length == recipe.length
        assert len(entry.token_ids) == recipe.length + make_golden.NEW_TOKENS
        assert int(entry.rows[-1]) == len(entry.token_ids) - 2
        assert entry.first_near_tie is None
        assert {"torch", "transformers"} <= entry.versions.keys()
    crossing = entry_of("topk2048_len2040")
    assert crossing.prompt_length < crossing.spec.index_topk < len(crossing.token_ids)


@pytest.mark.parametrize("name", ["topk8_len5", "topk64_len48", "fp8_weights_topk8_len100"])
def test_weights_are_unchanged(name: str, tmp_path: Path) -> None:
    entry = entry_of(name)
    write_checkpoint(entry.spec, tmp_path / "x")
    manifest = read_manifest(tmp_path / "x")
    assert manifest is not None
    assert manifest["weights_sha256"] == entry.weights_sha256


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("topk8_len5", 1e-5),
        # A value on the border of two FP8 codes may go either way on another machine.
        ("fp8_caches_topk8_len40", 2e-3),
    ],
)
def test_regenerates(name: str, bound: float, tmp_path: Path) -> None:
    stored = entry_of(name)
    oracle, weights_sha256 = make_golden.load_oracle(name, tmp_path)
    assert weights_sha256 == stored.weights_sha256
    prompt = stored.token_ids[: stored.prompt_length].tolist()
    made = make_golden.compute(name, oracle, weights_sha256, prompt)
    assert made is not None, "the run is no longer decided"
    comparison = compare_golden(right_answer(made), stored)
    assert comparison.compared == len(stored.rows)
    assert comparison.failures(max_diff=bound, max_excused_fraction=0.0) == []


def test_comparison_can_fail() -> None:
    entry = entry_of("topk8_len200")
    good = right_answer(entry)
    assert compare_golden(good, entry).failures(max_diff=0.0, max_excused_fraction=0.0) == []

    some = torch.arange(100, 120)
    part = dataclasses.replace(
        good, **{field.name: getattr(good, field.name)[some] for field in dataclasses.fields(good)}
    )
    assert compare_golden(part, entry).compared == 20

    for field, at, value in (
        ("token_logprobs", (7,), 1e-3),
        ("top_logprobs", (7, TOP - 1), 1e-3),
        ("token_logprobs", (7,), float("nan")),
        ("top_logprobs", (7, 0), float("nan")),
    ):
        bad = right_answer(entry)
        getattr(bad, field)[at] += value
        assert compare_golden(bad, entry).failures(max_diff=1e-5, max_excused_fraction=0.0)

    bad = right_answer(entry)
    bad.token_ids[30] += 1
    with pytest.raises(ValueError, match="token 31 is"):
        compare_golden(bad, entry)

    tied = dataclasses.replace(entry, first_near_tie=50)
    excused = compare_golden(good, tied)
    assert excused.compared == 50 and excused.excused == len(entry.rows) - 50
