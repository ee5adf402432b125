"""The stock server as a child process, for as long as one verification needs it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

READY_TIMEOUT_S = 1800
"""Loading a whole checkpoint from slow disks takes many minutes."""

_LOG_LINES = 15


@contextlib.contextmanager
def serve(
    checkpoint: Path,
    arguments: Sequence[str],
    waiting: Callable[[float], None] | None = None,
) -> Iterator[str]:
    """Start ``python -m sglang.launch_server`` on a free port and end it afterwards.

    Args:
        checkpoint: What to serve.
        arguments: Further arguments of the server.
        waiting: Called with the seconds since the start while the server is not ready.

    Yields:
        The server's address.

    Raises:
        RuntimeError: If the server ends before it is ready; says the last lines of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            # A session of its own, so that ending it ends every process that it started.
            start_new_session=True,
        )
        try:
            _wait_ready(process, url, log, waiting)
            yield url
        finally:
            _end(process)


def _wait_ready(
    process: subprocess.Popen[bytes],
    url: str,
    log: IO[str],
    waiting: Callable[[float], None] | None,
) -> None:
    started = time.monotonic()
    while time.monotonic() - started < READY_TIMEOUT_S:
        if process.poll() is not None:
            raise RuntimeError(
                f"verify: the server ended with {process.returncode} before it was ready; its log "
                f"ends with\n{_tail(log)}"
            )
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        if waiting is not None:
            waiting(time.monotonic() - started)
        time.sleep(0.25)
    raise RuntimeError(
        f"verify: the server is not ready after {READY_TIMEOUT_S} s; its log ends with\n{_tail(log)}"
    )


def _tail(log: IO[str]) -> str:
    log.seek(0)
    # The dump of all arguments is one line of many thousand characters.
    lines = [line.rstrip()[:300] for line in log if "server_args=" not in line]
    return "\n".join(lines[-_LOG_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
