"""The scheduler's loop while there is nothing to run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

#: Attention-DP ranks meet in every turn of their loops, so that a rank's pause is added to what the
#: others wait for; a decode step takes longer by far.
_PAUSE_S = 0.002


def pause_when_idle(result: None, self: Scheduler) -> None:
    """AFTER hook of `maybe_sleep_on_idle`: leave the core to others for a moment.

    `--sleep-on-idle` waits up to a second for a request of this rank, which would hold up the others
    that received one.
    """
    if self.idle_sleeper is None:
        time.sleep(_PAUSE_S)
