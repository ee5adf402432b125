"""Where tests keep what they write between runs."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`.cache/tests`, or a directory of its own there for each worker of a run in parallel.

    Two workers that write one checkpoint at a time would read each other's halves.
    """
    return (
        Path(__file__).parents[2] / ".cache" / "tests" / os.environ.get("PYTEST_XDIST_WORKER", "")
    )
