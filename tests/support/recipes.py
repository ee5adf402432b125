"""The recipes under `cookbook/`, run as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COOKBOOK = Path(__file__).parents[2] / "cookbook"
RECIPES = sorted(path.name for path in COOKBOOK.glob("[0-9][0-9]_*.py"))


def run_recipe(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python cookbook/NAME ARGUMENTS...`, by the tests' interpreter."""
    return subprocess.run(
        [sys.executable, str(COOKBOOK / name), *arguments],
        # As an installed package would be found.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
