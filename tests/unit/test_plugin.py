"""The plugin enters SGLang whole or stops the process.

test_every_seam_takes     a fresh process applies and probes every row that this machine needs
test_broken_seam_stops    a target that SGLang lacks, a hook undone, a model class not ours: SystemExit
test_turned_off*          SGLANG_GLM_ENABLE=0 leaves SGLang as it is
test_bad_variable         a misspelt or unparsable variable is refused by name
test_ledger_rows          rows are complete, and none is there twice
test_document_is_current  docs/upstream.md is generated from them
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_glm.compat.ledger import SEAMS
from sglang_glm.compat.seams import KINDS
from sglang_glm.platform import activate
from sglang_glm.plugin import register

ROOT = Path(__file__).parents[2]


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, as SGLang's children are."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); "


def test_every_seam_takes() -> None:
    code = LOAD + (
        "from sglang_glm.compat.apply import needed_seams, probe_seams; seams = needed_seams(); "
        "print(len(seams), probe_seams(seams)); "
        "from sglang.srt.models.registry import ModelRegistry; "
        "print(ModelRegistry.models['GlmMoeDsaForCausalLM'].__module__)"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr[-2000:]
    first, second = result.stdout.splitlines()[-2:]
    assert first.endswith(" []") and int(first.split()[0]) >= 10
    assert second == "sglang_glm.models.glm_moe_dsa"


BREAKAGES = {
    "no_such_target": (
        "import dataclasses, sglang_glm.compat.ledger as l, sglang_glm.compat.apply as a; "
        "row = next(s for s in l.SEAMS if s.kind == 'replace'); "
        "a.SEAMS = (*l.SEAMS, dataclasses.replace(row, target='sglang.srt.server_args.no_such_thing')); ",
        "sglang.srt.server_args.no_such_thing",
    ),
    "implementation_missing": (
        "import dataclasses, sglang_glm.compat.ledger as l, sglang_glm.compat.apply as a; "
        "row = next(s for s in l.SEAMS if s.kind == 'replace'); "
        "a.SEAMS = (dataclasses.replace(row, implementation='sglang_glm.plugin:no_such_thing'),); ",
        "no_such_thing",
    ),
    "model_package_fails": (
        "import sys; sys.modules['sglang_glm.models.weights'] = None; ",
        "ModelRegistry",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "model_package_fails",
        pytest.param("no_such_target", marks=pytest.mark.slow),
        pytest.param("implementation_missing", marks=pytest.mark.slow),
    ],
)
def test_broken_seam_stops(name: str) -> None:
    breakage, named = BREAKAGES[name]
    result = run(breakage + LOAD + "print('served the stock model')")
    assert result.returncode != 0
    assert "served the stock model" not in result.stdout
    assert named in result.stderr and "SGLANG_GLM_ENABLE=0" in result.stderr


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GLM_ENABLE", "0")
    monkeypatch.setattr(
        "sglang_glm.compat.apply.apply_seams", lambda: pytest.fail("it entered SGLang")
    )
    assert activate() is None
    register()


@pytest.mark.slow
def test_turned_off_serves_stock() -> None:
    code = LOAD + (
        "from sglang.srt.platforms import current_platform; "
        "from sglang.srt.models.registry import ModelRegistry; "
        "print(type(current_platform).__module__, "
        "ModelRegistry.models['GlmMoeDsaForCausalLM'].__module__)"
    )
    result = run(code, SGLANG_GLM_ENABLE="0")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "sglang_glm" not in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("variable", ["SGLANG_GLM_ENABEL", "SGLANG_GLM_INDEX_KEY_DTYPE"])
def test_bad_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "int4")
    with pytest.raises(SystemExit, match=variable):
        register()


def test_ledger_rows() -> None:
    assert len({(seam.target, seam.implementation) for seam in SEAMS}) == len(SEAMS)
    for seam in SEAMS:
        assert seam.kind in KINDS
        assert len(seam.why) >= 15 and seam.remove_when
        assert seam.probe is not None or seam.kind in ("after", "before", "around", "replace")


def test_document_is_current() -> None:
    from sglang_glm.compat.document import render_upstream

    assert (ROOT / "docs" / "upstream.md").read_text() == render_upstream(), "run `make docs`"
