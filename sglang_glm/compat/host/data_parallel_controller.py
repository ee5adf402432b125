"""The process that hands requests to attention-DP ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.data_parallel_controller import DataParallelController

#: Longest wait between two signs of life to the watchdog.
_WAIT_MS = 1000


def event_loop(self: DataParallelController) -> None:
    """Forward requests as they come, and sleep in between."""
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        self.soft_watchdog.feed()
        if self.recv_from_tokenizer.poll(_WAIT_MS):
            self._request_dispatcher(sock_recv(self.recv_from_tokenizer))
