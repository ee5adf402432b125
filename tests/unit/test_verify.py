"""`sglang-glm verify` without a server: each report says what is wrong, and where first.

test_golden_*                  a wrong value, a wrong token, a near-tie, entries of other checkpoints
test_nothing_compared_fails    a report without a comparison is no success
test_live_lengths              every change of path has a prompt on both sides
test_bf16_*                    a BF16 server is judged by transformers' own BF16 error
test_decided                   a prompt with a near-tie is not taken for a reference
test_identity                  the same checkpoint differs nowhere
test_stages_*                  the first stage that differs is the one that was broken, from the row on
test_dump_*                    passes of a chunked prompt are found among other traffic
test_refused                   arguments that make no comparison
test_too_large_for_transformers  refused before anything is loaded, with the way out
test_writes_golden             what is written is read again
test_not_golden                a file without entries is refused
test_behaviour                 the tests of the trained checkpoint join report and exit status
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.writer import write_checkpoint
from sglang_glm.cli import verify
from sglang_glm.cli.main import main
from sglang_glm.verification import layers, regression
from sglang_glm.verification.behaviour.run import BehaviourReport
from sglang_glm.verification.client import ServerFacts
from sglang_glm.verification.decided import is_decided
from sglang_glm.verification.formats import CacheFormats
from sglang_glm.verification.golden import GoldenEntry, identify, load_entry
from sglang_glm.verification.oracle import Oracle
from sglang_glm.verification.recording import record_oracle
from sglang_glm.verification.regression import PromptOutcome, judge_golden
from tests.support.golden import right_answer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = [5, 9, 2, 7, 11, 3, 8, 40, 41, 42, 43, 44]
#: The layer whose attention the broken copy gets wrong.
BROKEN_LAYER = 2


@pytest.fixture(scope="module")
def entry() -> GoldenEntry:
    return load_entry(GOLDEN / "topk8_len200.safetensors")


def test_golden_right(entry: GoldenEntry) -> None:
    outcome = judge_golden("e", right_answer(entry), entry, 1e-5)
    assert outcome.failures == [] and outcome.first_position is None
    assert outcome.compared == 215


def test_golden_wrong_value(entry: GoldenEntry) -> None:
    got = right_answer(entry)
    got.token_logprobs[30] += 1e-3
    got.token_logprobs[90] += 2e-3
    outcome = judge_golden("e", got, entry, 1e-5)
    # Row r predicts token r + 1; the first over the bound counts, not the largest.
    assert outcome.first_position == 31
    assert outcome.max_diff == pytest.approx(2e-3, rel=1e-3)
    assert outcome.failures


def test_golden_wrong_token(entry: GoldenEntry) -> None:
    got = right_answer(entry)
    got.token_ids[205] += 1
    got.token_logprobs[206] = float("nan")  # behind a wrong token nothing can be compared
    outcome = judge_golden("e", got, entry, 1e-5)
    assert outcome.first_position == 206 and outcome.compared == 205
    assert [failure for failure in outcome.failures if failure.startswith("token 206 is")]
    tied = dataclasses.replace(entry, first_near_tie=205)
    assert judge_golden("e", got, tied, 1e-5).failures == []


def test_golden_selection(entry: GoldenEntry) -> None:
    facts = ServerFacts(
        model="m",
        dtype="float32",
        formats=entry.formats,
        max_total_tokens=1000,
        max_input_tokens=1000,
        info={},
    )

    class Client:
        url = "http://here"

        def generate(self, input_ids: list[int], new_tokens: int) -> dict:
            assert input_ids == entry.token_ids[:200].tolist() and new_tokens == 16
            pairs = zip(entry.token_logprobs.tolist(), entry.token_ids[1:].tolist(), strict=True)
            rows = [[None, input_ids[0]], *([value, token] for value, token in pairs)]
            return {
                "meta_info": {
                    "input_token_logprobs": rows[:200],
                    "output_token_logprobs": rows[200:],
                }
            }

    fp8 = dataclasses.replace(entry, formats=CacheFormats(latent="fp8"))
    assert entry.spec is not None
    other = dataclasses.replace(entry, spec=dataclasses.replace(entry.spec, index_topk=64))
    report = regression.new_report(Client(), facts, "golden")
    regression.check_golden(
        report,
        Client(),
        facts,
        [("same", entry), ("fp8", fp8), ("other", other)],
        served=regression.Identity(spec=entry.spec, weights_sha256=entry.weights_sha256),
    )
    assert [prompt.name for prompt in report.prompts] == ["same"]
    assert [text.split()[0] for text in report.skipped] == ["fp8", "other"]
    assert report.passed and report.to_dict()["compared"] == 215
    assert "passed" in report.render()


def test_nothing_compared_fails(entry: GoldenEntry) -> None:
    report = empty_report(1e-5)
    assert not report.passed and "nothing was compared" in report.render()


def empty_report(bound: float | None) -> regression.Report:
    return regression.Report(
        url="u", model="m", dtype="float32", caches="c", reference="r", max_diff_allowed=bound
    )


def test_live_lengths() -> None:
    assert regression.live_lengths(64, 200) == [1, 5, 63, 64, 65, 130, 192]
    assert regression.live_lengths(2048, 60) == [1, 5]


@pytest.mark.parametrize(
    ("mean", "passes"), [(1.4e-2, True), (1.6e-2, False), (float("nan"), False)]
)
def test_bf16_yardstick(mean: float, passes: bool) -> None:
    report = empty_report(None)
    report.prompts = [
        PromptOutcome(
            name="5 tokens",
            prompt_tokens=5,
            compared=10,
            excused=0,
            max_diff=0.1,
            first_position=None,
            failures=[],
            mean_diff=mean,
            yardstick_mean_diff=1e-2,
        )
    ]
    assert report.passed is passes


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of four layers, and a copy in which one layer's attention is wrong."""
    root = tmp_path_factory.mktemp("verify")
    spec = CheckpointSpec(num_hidden_layers=4, index_topk=4, n_routed_experts=4, vocab_size=512)
    write_checkpoint(spec, root / "good")
    shutil.copytree(root / "good", root / "broken")
    (root / "broken" / "sglang_glm_checkpoint.json").unlink()
    tensors = load_file(root / "broken" / "model.safetensors")
    tensors[f"model.layers.{BROKEN_LAYER}.self_attn.o_proj.weight"] *= 1.5
    save_file(tensors, root / "broken" / "model.safetensors", metadata={"format": "pt"})
    return root / "good", root / "broken"


@pytest.fixture(scope="module")
def oracle(checkpoints: tuple[Path, Path]) -> Oracle:
    return Oracle(checkpoints[0])


def test_decided(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_decided(oracle, PROMPT)
    tied = oracle.run(PROMPT)
    tied.relative_gap[-1] = 0.0
    monkeypatch.setattr(oracle, "run", lambda _ids: tied)
    assert not is_decided(oracle, PROMPT)


def test_identity(checkpoints: tuple[Path, Path], oracle: Oracle) -> None:
    good, broken = (identify(path) for path in checkpoints)
    assert good.spec is not None and broken.spec is None and good != broken
    ((_, made),) = record_oracle(oracle, [6], vocab=300)
    assert good.made(made) and not broken.made(made)
    assert judge_golden("e", right_answer(made), made, 1e-6).failures == []


def test_stages_name_the_broken_layer(checkpoints: tuple[Path, Path], oracle: Oracle) -> None:
    expected = layers.reference_stages(oracle, PROMPT)
    assert len(expected) == 9
    broken = layers.reference_stages(Oracle(checkpoints[1]), PROMPT)
    report = layers.compare_stages(broken, expected)
    assert report.first is not None and report.first.first_position == 0
    assert report.first.stage.startswith(f"layer {BROKEN_LAYER} attention")
    assert f"first difference: layer {BROKEN_LAYER} attention" in "\n".join(report.render())
    assert json.dumps(report.to_dict())
    same = layers.compare_stages(expected, expected)
    assert same.first is None and "all 9 stages agree" in "\n".join(same.render())


def test_stages_from_a_row_on(oracle: Oracle) -> None:
    expected = layers.reference_stages(oracle, PROMPT)
    name = list(expected)[4]
    for value in (expected[name][7] * 1.01, torch.full_like(expected[name][7], float("nan"))):
        got = {**expected, name: expected[name].clone()}
        got[name][7] = value
        first = layers.compare_stages(got, expected).first
        assert first is not None and (first.stage, first.first_position) == (name, 7)
        # Behind a near-tie a row may be anything.
        assert layers.compare_stages(got, expected, first_near_tie=7).first is None
    rounded = {stage: state.bfloat16().float() for stage, state in expected.items()}
    assert layers.compare_stages(rounded, expected, rounded=rounded).first is None
    assert layers.compare_stages(rounded, expected).first is not None


def passes_of(stages: layers.Stages, ids: list[int], chunk: int) -> list[dict]:
    """The dumps that SGLang would write for a prompt in chunks, with a padded row each."""
    states, made = list(stages.values()), []
    for start in range(0, len(ids), chunk):
        rows = slice(start, start + chunk)
        padded = [torch.cat([state[rows], torch.ones(1, state.shape[1])]) for state in states]
        dump = {
            "model.embed_tokens": padded[0],
            "model.layers.0.input_layernorm": padded[0],
            "model.norm": [padded[-1], padded[-1]],
            "model.forward_batch_info.input_ids": torch.tensor(ids[rows]),
            "model.forward_batch_info.positions": torch.arange(start, len(ids))[:chunk],
        }
        for layer in range((len(states) - 1) // 2):
            after = padded[2 * layer + 1]
            dump[f"model.layers.{layer}.post_attention_layernorm"] = [after, after]
            if layer:
                dump[f"model.layers.{layer}.input_layernorm"] = [padded[2 * layer]] * 2
        made.append(dump)
    return made


def test_dump_of_chunks(oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = layers.reference_stages(oracle, PROMPT)
    folder = tmp_path / "TP0_PP0_Rank0_pid1"
    folder.mkdir()
    torch.save(passes_of(expected, PROMPT, 12)[0], folder / "Pass00000.pt")
    before = set(layers._files(tmp_path))
    other = passes_of(expected, [9, 9, 9], 3)
    for number, dump in enumerate([*other, *passes_of(expected, PROMPT, 5)], start=1):
        torch.save(dump, folder / f"Pass{number:05d}.pt")
    passes = layers._read_prompt(tmp_path, before, PROMPT)
    assert len(passes) == 3
    got = layers.dumped_stages(passes, list(expected))
    assert list(got) == list(expected)
    assert layers.compare_stages(got, expected).first is None

    del passes[1]["model.layers.1.post_attention_layernorm"]
    gap = layers.compare_stages(layers.dumped_stages(passes, list(expected)), expected)
    assert gap.missing == [list(expected)[3]] and gap.first is None
    monkeypatch.setattr(layers, "_WRITTEN_WITHIN_S", 0.0)
    with pytest.raises(RuntimeError, match=r"hidden states of 0 of 2 prompt tokens"):
        layers._read_prompt(tmp_path, before, [500, 501])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "neither a CHECKPOINT nor --url"),
        (["--url", "http://127.0.0.1:9"], "nothing to compare with"),
        (["--url", "http://127.0.0.1:9", "--layers"], "needs the folder"),
        (["--url", "http://127.0.0.1:9", "--live"], "does not answer"),
        (["--url", "http://127.0.0.1:9", "--live", "--server-args=--tp 2"], "drop it or --url"),
        (["/nowhere", "--live"], "no config.json"),
    ],
)
def test_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 1
    assert said in capsys.readouterr().err


def test_too_large_for_transformers(
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sglang_glm.verification.client.machine_memory_bytes", lambda: 1000)
    assert main(["verify", str(checkpoints[0]), "--write-golden", str(tmp_path)]) == 1
    assert "record golden files from a server" in capsys.readouterr().err


def test_writes_golden(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    words = [
        "verify",
        str(checkpoints[0]),
        "--write-golden",
        str(tmp_path),
        "--prompt-lengths",
        "3,9",
    ]
    assert main(words) == 0
    made = load_entry(tmp_path / "len9.safetensors")
    assert made.prompt_length == 9 and identify(checkpoints[0]).made(made)


def test_not_golden(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="no golden header"):
        load_entry(checkpoints[0] / "model.safetensors")


def test_behaviour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The behaviour tests join the report and the exit status."""
    seen = {}

    class Outcome:
        def __init__(self, passed: bool) -> None:
            self.passed = passed

        def to_dict(self) -> dict:
            return {"retrieval": 0.5}

        def render(self) -> str:
            return "half of it"

    def run_behaviour(url: str, options: argparse.Namespace, progress: Callable) -> Outcome:
        seen.update(url=url, questions=options.questions)
        progress("a line")
        return Outcome(passed=options.questions > 9)

    for name in ("to_dict", "render", "passed"):
        assert hasattr(BehaviourReport, name), name
    monkeypatch.setattr(verify, "run_behaviour", run_behaviour)
    words = ["verify", "--url", "http://server", "--behaviour"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"behaviour": {"retrieval": 0.5}, "passed": True}
    assert main([*words, "--questions", "9"]) == 1
    assert "half of it" in capsys.readouterr().out
    assert seen == {"url": "http://server", "questions": 9}
