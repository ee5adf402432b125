"""What every command of `sglang-glm` does alike.

test_help            each command describes itself and shows examples
test_no_command      says what is missing and where to read on
test_version         the package's
test_one_line        arguments that cannot be parsed: one line, exit status 2
test_errors          what a command raises: one sentence, exit status 1
test_interrupted     Ctrl-C ends without a traceback
test_closed_pipe     so does a reader that has seen enough
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import sglang_glm
from sglang_glm.cli import main as program
from sglang_glm.cli.main import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and text.count(f"sglang-glm {command}") >= 3


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    written = capsys.readouterr()
    assert written.out == "" and len(written.err.splitlines()) == 1
    return written.err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "required: COMMAND; see sglang-glm --help" in refused([], capsys)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == sglang_glm.__version__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve"], "invalid choice: 'serve'"),
        (["plan", "--tp", "eight"], "argument --tp/--tp-size: invalid int value: 'eight'"),
        (["plan", "m", "--context", "0"], "'0' is not a number of tokens such as 8192 or 128k"),
        (["plan", "m", "--experts-hit", "8", "--expert-histogram", "h"], "not allowed with"),
        (["checkpoint"], "required: DIR; see sglang-glm checkpoint --help"),
        (["doctor", "--kv-cache-dtype", "int4"], "invalid choice: 'int4'"),
        (["verify", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(words, capsys)


def fails(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(_arguments: object) -> int:
        raise error

    command = SimpleNamespace(configure=lambda parser: None, run=run)
    monkeypatch.setattr(program.importlib, "import_module", lambda _name: command)
    return main(["plan"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("plan: tp is 3, expected 4"), "tp is 3, expected 4"),
        (RuntimeError("the server ended"), "the server ended"),
        (PermissionError(13, "Permission denied", "/etc/x"), "/etc/x: Permission denied"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
    ids=["value", "runtime", "path", "disk"],
)
def test_errors(
    error: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fails(error, monkeypatch) == 1
    wrong = capsys.readouterr().err
    assert wrong.startswith(f"sglang-glm plan: error: {said}") and wrong.count("\n") == 1


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err.strip() == "sglang-glm plan: interrupted"


def test_closed_pipe() -> None:
    run = "from sglang_glm.cli.main import main; raise SystemExit(main(['plan', 'zai-org/GLM-5.3', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
