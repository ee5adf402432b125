"""What SGLang makes of a command line, without starting anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args
outcomes = []
for case in json.load(sys.stdin):
    try:
        server_args = prepare_server_args(case["argv"])
        server_args.resolve_once()
        view = resolving_view(server_args)
        outcomes.append({"resolved": {name: getattr(view, name) for name in case["read"]}})
    except SystemExit as error:
        outcomes.append({"rejected": f"argparse exit {error.code}"})
    except Exception as error:
        outcomes.append({"refused": f"{type(error).__name__}: {error}"})
print("OUTCOMES" + json.dumps(outcomes))
"""


def resolve(cases: list[tuple[list[str], list[str]]]) -> list[dict]:
    """Resolve each `(argv, fields to read)`, all in one process.

    Returns:
        For each `{"resolved": {field: value}}`, `{"refused": "error"}` or `{"rejected": "..."}`.
    """
    return outcomes(_PROGRAM, [{"argv": argv, "read": read} for argv, read in cases])


def outcomes(program: str, cases: list[dict], **env: str) -> list[dict]:
    """Run a program that reads `cases` as JSON and prints "OUTCOMES" before its list of answers."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(cases),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("OUTCOMES")]
    if not lines:
        raise RuntimeError(f"exit {result.returncode}\n{result.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("OUTCOMES"))
