"""The smoke as a test, in a process of its own: the plugin changes the one that it is loaded in."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_smoke() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.serving.smoke"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
