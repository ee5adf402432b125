"""Progress of long work on standard error, so that standard output stays the result."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL_S = 2.0


def in_megabytes(done: int, total: int) -> str:
    """`done` of `total` bytes in words."""
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB ({100 * done // total}%)"


def counted(noun: str) -> Callable[[int, int], str]:
    """Words for `done` of `total` things."""
    return lambda done, total: f"{done} of {total} {noun}"


class ProgressLine:
    """Prints at most one line every two seconds, so that quick work prints nothing."""

    def __init__(self, describe: Callable[[int, int], str]) -> None:
        """Start the clock.

        Args:
            describe: Turns done and total into words.
        """
        self._describe = describe
        self._next = time.monotonic() + _INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        """Print where the work stands, if it is time."""
        self.say(self._describe(done, total))

    def say(self, text: str) -> None:
        """Print `text`, if it is time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL_S
        print(f"  {text}", file=sys.stderr, flush=True)
