"""`sglang-glm doctor` on this machine, with another SGLang, and with the plugin broken on purpose.

test_this_machine      every part, what is chosen on the CPU, and for a given command line of the server
test_server_arguments  a command line that the server does not take
test_h200              the form on H200s: pretended ones, and a recording of a real one where there is any
test_source_tree       the declared range of SGLang where the package is not installed
test_broken_plugin     (slow) a seam that did not take fails the diagnosis
test_other_sglang      a version outside the range, with the remedy
test_no_sglang         none at all
test_report            the text of what failed
test_help              examples
"""

import json
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from sglang_glm.cli.main import main
from sglang_glm.compat.ledger import SEAMS
from sglang_glm.diagnosis import environment
from sglang_glm.diagnosis.findings import Diagnosis, Finding
from sglang_glm.diagnosis.server import check_command
from tests.support.checkpoints import checkpoint
from tests.support.documents import ROOT
from tests.support.pretend_h200 import command_on_h200


def doctor(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"from sglang_glm.cli.main import main; raise SystemExit(main({['doctor', *options]!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_this_machine() -> None:
    model = checkpoint("--mtp", "--index-topk", "8")
    served = ("--model-path", model, "--kv-cache-dtype", "fp8_e4m3")
    result = doctor("--json", "--kv-cache-dtype", "float8_e4m3fn", "--", *served)
    assert result.returncode == 0, result.stdout + result.stderr
    findings = json.loads(result.stdout)["findings"]
    parts = {finding["part"] for finding in findings}
    assert {"versions", "accelerators", "seams", "self-check on the CPU"} <= parts
    assert sum(f["part"] == "seams" and f["state"] == "ok" for f in findings) >= 30
    told = {f["name"]: f["detail"] for f in findings if f["part"] == "the given server arguments"}
    assert told["--kv-cache-dtype"] == "fp8_e4m3, as given"
    assert told["--dsa-decode-backend"] == "glm_sparse, chosen without a flag"
    chosen = [f["name"] for f in findings if f["detail"] == "chosen without a flag"]
    assert chosen == [
        "--dsa-prefill-backend glm_auto",
        "--dsa-decode-backend glm_sparse",
        "--dsa-topk-backend glm_exact",
    ]


#: `sglang-glm doctor --json` of a real machine, as tests/gpu/serving/smoke.py leaves it.
RECORDED = ROOT / "docs" / "bench" / "doctor_h200.json"

CHOICES = {
    "decode 1 x 1, 64 heads a rank": "glm_sparse",
    "decode 16 x 1, 64 heads a rank": "glm_sparse",
    "decode 32 x 1, 64 heads a rank": "glm_sparse",
    "verify 1 x 6, 64 heads a rank": "glm_sparse",
    "verify 16 x 6, 64 heads a rank": "glm_sparse",
    "verify 32 x 6, 64 heads a rank": "glm_sparse",
    "decode 1 x 1, 8 heads a rank": "glm_sparse",
    "decode 16 x 1, 8 heads a rank": "glm_sparse",
    "decode 32 x 1, 8 heads a rank": "glm_sparse",
    "verify 1 x 6, 8 heads a rank": "glm_sparse",
    "verify 16 x 6, 8 heads a rank": "glm_verify",
    "verify 32 x 6, 8 heads a rank": "glm_verify",
}
"""What serves an FP8 cache on an H200 without a flag, from docs/bench/attention.jsonl."""


@pytest.mark.parametrize("source", ["pretended", *["recorded"] * RECORDED.is_file()])
def test_h200(source: str) -> None:
    if source == "pretended":
        result = command_on_h200("doctor", "--json", "--kv-cache-dtype", "float8_e4m3fn")
        assert result.returncode == 0, result.stdout + result.stderr
        report = json.loads(result.stdout)
    else:
        report = json.loads(RECORDED.read_text())
    assert report["healthy"]
    of_part: dict[str, list[dict]] = {}
    for finding in report["findings"]:
        of_part.setdefault(finding["part"], []).append(finding)
    gpus = of_part["accelerators"]
    assert [gpu["name"] for gpu in gpus] == [f"cuda:{index}" for index in range(len(gpus))]
    assert all(gpu["detail"].startswith("NVIDIA H200, sm_90, 15") for gpu in gpus)
    seams = {"everywhere": "ok", "cuda": "ok", "host": "not needed"}
    assert [finding["state"] for finding in of_part["seams"]] == [
        seams[seam.scope] for seam in SEAMS
    ]
    backends = {
        finding["name"]: finding["state"]
        for finding in of_part["DSA backends for a float8_e4m3fn cache"]
    }
    assert backends == {
        "--dsa-prefill-backend glm_auto": "not needed",
        "--dsa-prefill-backend glm_masked": "not needed",
        "--dsa-prefill-backend glm_sparse": "ok",
        "--dsa-decode-backend glm_auto": "ok",
        "--dsa-decode-backend glm_sparse": "ok",
        "--dsa-topk-backend glm_exact": "ok",
    }
    chosen = of_part["decision for a float8_e4m3fn cache, no flag given"]
    assert {finding["name"]: finding["detail"].partition(":")[0] for finding in chosen} == CHOICES


def test_server_arguments() -> None:
    assert list(check_command([])) == []
    (finding,) = check_command(["--model-path", "m", "--tp-size", "eight"])
    assert finding.state == "failed" and finding.detail.endswith("invalid int value: 'eight'")
    assert "--help" in finding.remedy


def test_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = environment.sglang_requirement()

    def missing(name: str) -> list[str]:
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "requires", missing)
    assert environment.sglang_requirement() == installed


@pytest.mark.slow
def test_broken_plugin() -> None:
    result = doctor(SGLANG_EXTERNAL_MODEL_PACKAGE="somebody.elses")
    assert result.returncode == 1
    assert "failed" in result.stdout and "somebody.elses" in result.stdout
    assert "not healthy" in result.stdout


def test_other_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "sglang_requirement", lambda: Requirement("sglang>=0.6"))
    finding = next(iter(environment.check_versions()))
    assert finding.state == "failed" and "0.5.23" in finding.detail
    assert finding.remedy == "pip install 'sglang>=0.6'"


def test_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", missing)
    (finding,) = environment.check_versions()
    assert finding.state == "failed" and finding.detail == "not installed"
    assert finding.remedy.startswith("pip install 'sglang")


def test_report() -> None:
    bad = Finding(part="p", name="n", state="failed", detail="d", remedy="r")
    good = Finding(part="p", name="m", state="ok", detail="d")
    assert Diagnosis([good]).healthy and not Diagnosis([good, bad]).healthy
    assert "failed     n: d" in Diagnosis([bad]).render() and "→ r" in Diagnosis([bad]).render()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--help"])
    assert stop.value.code == 0
    assert "examples:" in capsys.readouterr().out
