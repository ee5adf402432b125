"""The scripts under `launch/`, asked for the commands that they compose."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

LAUNCH = Path(__file__).parents[2] / "launch"
#: Shapes of GPUs; the others serve anything, or are no server.
SHAPES = sorted(path.name for path in LAUNCH.glob("serve_h*.sh") if "router" not in path.name)
#: Files that scripts source.
SOURCED = ("common.sh", "pd_pair.sh")
#: What a script cannot know itself.
REQUIRED = {"serve_h100x16.sh": ("--dist-init-addr", "head:20000")}


@dataclass(frozen=True)
class Composed:
    """One composed command: variables, and arguments of the server."""

    env: dict[str, str]
    argv: list[str]

    def value(self, flag: str) -> str:
        return self.argv[self.argv.index(flag) + 1]

    def flags(self) -> dict[str, str]:
        """Flag to value, empty for a switch."""
        found: dict[str, str] = {}
        for index, word in enumerate(self.argv):
            if word.startswith("--"):
                follower = self.argv[index + 1 : index + 2]
                found[word] = follower[0] if follower and not follower[0].startswith("--") else ""
        return found


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCH / name), *REQUIRED.get(name, ()), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def compose(name: str, *arguments: str) -> Composed:
    result = run_script(name, "--dry-run", *arguments)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    words = shlex.split(line[2:])
    at = words.index("-m")
    assert words[at + 1] == "sglang.launch_server"
    env = dict(word.split("=", 1) for word in words[: at - 1] if "=" in word)
    return Composed(env=env, argv=words[at + 2 :])


def plan_arguments(name: str) -> list[str] | None:
    """The `sglang-glm plan` line that a script was made from, if it names one."""
    found = re.search(r"^# plan: (.+)$", (LAUNCH / name).read_text(), re.MULTILINE)
    return None if found is None else shlex.split(found[1])


def expected_kv_tokens(name: str) -> int:
    found = re.search(r"^expects_kv_tokens (\d+)$", (LAUNCH / name).read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1])


def check_allocated() -> ModuleType:
    """`launch/check_allocated.py`, which is a program and no package's module."""
    path = LAUNCH / "check_allocated.py"
    spec = importlib.util.spec_from_file_location("check_allocated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
