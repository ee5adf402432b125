"""Every command of the documents runs: for real where it can here, else up to its dry run.

test_newcomer          README from the top, in order, in an empty folder
test_documented        the commands of every document
test_all_are_fenced    a block that shows a command is marked as bash, or no test would see it
test_serving_for_real  (slow) README's own install section against a real server
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import requests

from sglang_glm.cli.main import main as sglang_glm
from tests.support.documents import DOCUMENTS, ROOT, Command, commands
from tests.support.resolve import resolve
from tests.support.server import Server, ServerSpec

README = commands(ROOT / "README.md")


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Reader:
    """Runs what a document says, in a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.to_resolve: list[list[str]] = []

    def place(self, word: str) -> str:
        """A document's folder for examples, moved into this reader's."""
        return re.sub(r"^(/tmp|\.cache)/", f"{self.folder}/", word)

    def run(self, words: tuple[str, ...]) -> None:
        program, rest = words[0], [self.place(word) for word in words[1:]]
        if program == "sglang-glm":
            self.sglang_glm(rest)
        elif program == "make":
            self.make(rest)
        elif words[:3] == ("python", "-m", "sglang.launch_server"):
            self.to_resolve.append(rest[2:])
        elif words[:2] == ("python", "-m") and find_spec(words[2].split(".")[0]) is None:
            # Comes with an extra that these tests do without; the document must say which.
            extras = pyproject()["optional-dependencies"].values()
            named = {re.split(r"[<>=\[]", line)[0] for extra in extras for line in extra}
            assert words[2].split(".")[0].replace("_", "-") in named
        elif words[:2] == ("python", "-m"):
            self.ok([sys.executable, "-m", words[2], "--help"])
        elif program == "python":
            self.ok([sys.executable, words[1], "--help"], PYTHONPATH=os.pathsep.join(sys.path))
        elif program.startswith("launch/"):
            self.ok([str(ROOT / program), *rest, "--dry-run"])
        elif words[:2] == ("pip", "install"):
            project = pyproject()
            assert project["name"] == "sglang-glm" and "sglang-glm" in project["scripts"]
            place, _, extra = words[2].rstrip("]").partition("[")
            assert place == "." and (not extra or extra in project["optional-dependencies"])
        else:
            pytest.fail(f"no test knows how to run {' '.join(words)}")

    def ok(self, words: list[str], **env: str) -> str:
        result = subprocess.run(
            words, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def make(self, words: list[str]) -> None:
        done = self.ok(["make", "--dry-run", "--always-make", *words])
        assert done.strip(), words

    def sglang_glm(self, words: list[str]) -> None:
        if words[0] in ("plan", "checkpoint"):
            written = os.getcwd()
            os.chdir(self.folder)
            try:
                assert sglang_glm(words) == 0
            finally:
                os.chdir(written)
            return
        # These need a server, or look at this machine: their own tests run them.
        if "--" in words:
            at = words.index("--")
            words, of_server = words[:at], words[at + 1 :]
            self.to_resolve.append(of_server)
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            sglang_glm([*words, "--help"])
        assert stop.value.code == 0
        known = set(re.findall(r"--[\w-]+", self.capsys.readouterr().out))
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known

    def resolve_all(self) -> None:
        """What was kept for SGLang's own resolution, in one process."""
        for outcome in resolve([(argv, ["model_path"]) for argv in self.to_resolve]):
            assert "resolved" in outcome, outcome


def test_newcomer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = Reader(tmp_path, capsys)
    for command in README:
        reader.run(command.words)
    assert (tmp_path / "glm-tiny" / "config.json").is_file()
    assert len(reader.to_resolve) >= 1
    reader.resolve_all()
    first = [command.words[:2] for command in README[:2]]
    assert first == [("make", "serve"), ("make", "test")], "the first screen has two commands"


OTHERS = [
    command
    for document in DOCUMENTS
    if document.name != "README.md" or document.parent != ROOT
    for command in commands(document)
]


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_documented(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = Reader(tmp_path, capsys)
    reader.run(command.words)
    for argv in reader.to_resolve:
        # A checkpoint that the document leaves to the reader is not resolved, but parsed.
        from sglang.srt.server_args import prepare_server_args

        assert prepare_server_args(argv).model_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_are_fenced(document: Path) -> None:
    for language, body in re.findall(
        r"^```(\w*)\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE
    ):
        shows = re.search(r"^(sglang-glm|make|pip|launch/|python -m sglang)", body, re.MULTILINE)
        assert language == "bash" or not shows, body


@pytest.mark.slow
def test_serving_for_real(tmp_path: Path) -> None:
    """The three lines of README's own install section, then an answer."""
    launch = next(
        c.words for c in README if c.words[:3] == ("python", "-m", "sglang.launch_server")
    )
    written = next(c.words for c in README if c.words[:2] == ("sglang-glm", "checkpoint"))
    model = launch[launch.index("--model") + 1]
    assert written[2] == model, "the server is started on what was written"
    assert sglang_glm(["checkpoint", str(tmp_path / "tiny"), *written[3:]]) == 0
    others = [word for word in launch[3:] if word not in ("--model", model)]
    at = others.index("--port")
    server = Server(ServerSpec(str(tmp_path / "tiny"), tuple(others[:at] + others[at + 2 :])))
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 8
    finally:
        server.stop()
