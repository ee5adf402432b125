"""The stock server as a child process, for as long as something needs it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

READY_TIMEOUT_S = 1800
"""Loading a whole checkpoint from slow disks takes many minutes."""


class LocalServer:
    """``python -m sglang.launch_server`` on a free port, started as a user would start it.

    It ends, with every process that it started, when the context is left, when :meth:`stop` is called,
    and when this process dies without doing either.

    Attributes:
        url: Its address.
        port: Of that address.
        process: The server's first process.
        ready_after_s: Seconds from its start until it answered.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        waiting: Callable[[float], None] | None = None,
    ) -> None:
        """Start the server and wait until it is ready.

        Args:
            arguments: Of the server, the model's among them, the port's not.
            env: Its environment; this process's by default.
            ready_timeout_s: Patience with its start.
            waiting: Called with the seconds since the start while the server is not ready.

        Raises:
            RuntimeError: If the server ends before it is ready, or is not ready in time; says the last
                lines of its log.
        """
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Appending: the child shares this descriptor's offset, and reading moves it.
        # Kept open, so that the log can be read after the server has ended.
        self._log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments, "--port", str(self.port)],
            env=env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A session of its own, so that stopping it ends every process that it started.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            self._wait_ready(ready_timeout_s, waiting)
        except BaseException:
            self.stop()
            raise
        self.ready_after_s = time.monotonic() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """Everything that it has printed."""
        self._log.seek(0)
        return self._log.read()

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log, without the dump of all arguments, cut to 400 characters each."""
        kept = [line[:400] for line in self.log.splitlines() if "server_args=" not in line]
        return "\n".join(kept[-lines:])

    def stop(self) -> None:
        """End it and every process that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _wait_ready(self, timeout_s: float, waiting: Callable[[float], None] | None) -> None:
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with {self.process.returncode} before it was ready; its log "
                    f"ends with\n{self.tail()}"
                )
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            if waiting is not None:
                waiting(time.monotonic() - started)
            time.sleep(0.25)
        raise RuntimeError(
            f"the server is not ready after {timeout_s} s; its log ends with\n{self.tail()}"
        )


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it dies without stopping it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL("libc.so.6").prctl(pr_set_pdeathsig, signal.SIGTERM)
