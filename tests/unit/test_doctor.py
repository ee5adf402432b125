"""`sglang-glm doctor` on this machine, with another SGLang, and with the plugin broken on purpose."""

import json
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from sglang_glm.cli.main import main
from sglang_glm.diagnosis import environment
from sglang_glm.diagnosis.findings import Diagnosis, Finding


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
    result = doctor("--json", "--kv-cache-dtype", "float8_e4m3fn")
    assert result.returncode == 0, result.stdout + result.stderr
    findings = json.loads(result.stdout)["findings"]
    parts = {finding["part"] for finding in findings}
    assert {"versions", "accelerators", "seams", "self-check on the CPU"} <= parts
    assert sum(f["part"] == "seams" and f["state"] == "ok" for f in findings) >= 30
    chosen = [f["name"] for f in findings if f["detail"] == "chosen without a flag"]
    assert chosen == [
        "--dsa-prefill-backend glm_auto",
        "--dsa-decode-backend glm_sparse",
        "--dsa-topk-backend glm_exact",
    ]


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
