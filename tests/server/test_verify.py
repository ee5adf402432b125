"""`sglang-glm verify` against the suite's servers: right ones pass, a wrong reference fails.

test_golden            the repository's golden files, read as a user would
test_live              transformers now, in FP32, through FP8 caches, and in BF16 by its own error
test_wrong_reference   another layer's weights: exit 1, and the first prompt and position are named
test_recorded          what a server said is a reference for it later
test_layers            (slow) hidden states of a server started here name the broken layer
"""

import json
from pathlib import Path

import pytest

from sglang_glm.cli.main import main
from tests.support.mtp_checkpoints import rewrite
from tests.support.server import Server
from tests.support.specs import BF16_8, FP8_CACHE_8, TRUTH_8

GOLDEN = Path(__file__).parents[1] / "golden"
BROKEN_LAYER = 4


def broken() -> str:
    """A copy of the served checkpoint in which one layer's attention is half as strong again."""

    def change(tensors: dict, config: dict) -> None:
        tensors[f"model.layers.{BROKEN_LAYER}.self_attn.o_proj.weight"] *= 1.5

    return rewrite(TRUTH_8.model, "verify-broken", change)


def verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    status = main(["verify", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("server", [TRUTH_8], indirect=True, ids=["truth"])
def test_golden(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = verify(capsys, "--url", server.url, "--golden", str(GOLDEN))
    assert status == 0, report["failures"]
    assert [prompt["name"] for prompt in report["prompts"]] == ["topk8_len200", "topk8_len5"]
    assert len(report["skipped"]) == 6 and report["compared"] == 235


@pytest.mark.parametrize(
    "server", [TRUTH_8, FP8_CACHE_8, BF16_8], indirect=True, ids=["truth", "fp8_cache", "bf16"]
)
def test_live(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.spec.env:
        monkeypatch.setenv(name, value)
    words = ("--url", server.url, "--live", "--prompt-lengths", "5,9,24")
    status, report = verify(capsys, *words)
    assert status == 0, report["failures"]
    assert len(report["prompts"]) == 3 and report["compared"] >= 50


@pytest.mark.parametrize("server", [TRUTH_8], indirect=True, ids=["truth"])
def test_wrong_reference(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--url", server.url, "--live", "--reference", broken(), "--prompt-lengths", "9")
    status, report = verify(capsys, *words)
    assert status == 1 and report["max_diff"] > 1e-3
    assert report["first_difference"]["prompt"] == "9 tokens"
    assert report["first_difference"]["position"] <= 2


@pytest.mark.parametrize("server", [TRUTH_8], indirect=True, ids=["truth"])
def test_recorded(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "today")
    assert (
        main(["verify", "--url", server.url, "--write-golden", folder, "--prompt-lengths", "7,65"])
        == 0
    )
    status, report = verify(capsys, "--url", server.url, "--golden", folder)
    assert status == 0, report["failures"]
    assert report["compared"] == 7 + 65 + 2 * 15


@pytest.mark.slow
def test_layers(capsys: pytest.CaptureFixture[str]) -> None:
    words = (TRUTH_8.model, "--layers", "--reference", broken(), "--prompt-lengths", "24")
    status, report = verify(capsys, *words, "--server-args=--max-total-tokens 4096")
    assert status == 1
    assert report["layers"]["first"]["stage"].startswith(f"layer {BROKEN_LAYER} attention")
    assert len(report["layers"]["stages"]) == 17
