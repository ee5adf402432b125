"""Time of a forward pass on the CPU, which has no events to record."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class HostInterval:
    """One timed forward; SGLang's own form records two events of an accelerator.

    A forward on the CPU is over when it returns, so an interval is complete once it has an end.
    """

    metadata: dict[str, Any] | None = None
    observer: Any = None
    stream: Any = None
    _started_s: float = field(default_factory=time.perf_counter)
    _ended_s: float | None = None

    @staticmethod
    def create(track_stream: bool = False) -> HostInterval:
        """Start an interval; there is no stream to track."""
        return HostInterval()

    def end(self, metadata: dict[str, Any]) -> None:
        """End it; `metadata` goes to the reporters."""
        self._ended_s = time.perf_counter()
        self.metadata = metadata

    def is_complete(self) -> bool:
        """Whether it has ended."""
        return self._ended_s is not None

    def is_active(self) -> bool:
        """Whether it is still running."""
        return not self.is_complete()

    def elapsed_time(self) -> float:
        """Milliseconds between start and end.

        Raises:
            RuntimeError: it has not ended.
        """
        if self._ended_s is None:
            raise RuntimeError("the interval is still running; call end() first")
        return 1000 * (self._ended_s - self._started_s)
