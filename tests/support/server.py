"""A real SGLang server as a child process, for as long as tests need it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import requests

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_TIMEOUT_S = 240


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """What a server is started with. Tests with an equal spec share one server."""

    model: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


class Server:
    """`python -m sglang.launch_server` with a spec, as a user would start it."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        log_fd, self._log_path = tempfile.mkstemp(prefix="sglang-", suffix=".log")
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model",
            spec.model,
            "--port",
            str(self.port),
        ]
        started = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *spec.args],
            # Two threads on two cores stall each other as soon as anything else runs beside them.
            env={"OMP_NUM_THREADS": "1", **os.environ, **dict(spec.env)},
            stdout=log_fd,
            stderr=subprocess.STDOUT,
            # A session of its own, so that stopping it ends every process that it started.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        os.close(log_fd)
        self._wait_ready()
        self.ready_after_s = time.monotonic() - started

    @property
    def log(self) -> str:
        """Everything that it has printed."""
        return Path(self._log_path).read_text(errors="replace")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with {self.process.returncode}:\n{self.tail()}"
                )
            try:
                if requests.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.25)
        self.stop()
        raise RuntimeError(f"no answer within {READY_TIMEOUT_S} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log, without the dump of all arguments."""
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

    def post(self, path: str, **body: object) -> requests.Response:
        """POST `body` as JSON."""
        return requests.post(f"{self.url}{path}", json=body, timeout=300)

    def generate(
        self,
        input_ids: list[int] | list[list[int]],
        *,
        logprob_start_len: int = 0,
        routed_dp_rank: int | None = None,
        return_indexer_topk: bool = False,
        **sampling: object,
    ) -> dict | list[dict]:
        """Greedy generation from token ids with log-probabilities of prompt and output.

        Args:
            input_ids: One prompt or several.
            logprob_start_len: First position with a log-probability. No prefix beyond it is reused.
            routed_dp_rank: The rank of attention data parallelism that serves it.
            return_indexer_topk: Also return the selections; the server needs the flag for it.
            sampling: SGLang's sampling parameters.
        """
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
        response = self.post(
            "/generate",
            input_ids=input_ids,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=5,
            routed_dp_rank=routed_dp_rank,
            return_indexer_topk=return_indexer_topk,
        )
        response.raise_for_status()
        return response.json()

    def flush_cache(self) -> None:
        """Forget every cached prefix; retried while the last request is still being released."""
        for _ in range(40):
            response = requests.post(f"{self.url}/flush_cache", timeout=30)
            if response.status_code == 200:
                return
            time.sleep(0.25)
        raise RuntimeError(f"/flush_cache answered {response.status_code}: {response.text}")

    def rank_process(self, rank: int) -> psutil.Process:
        """The process of one tensor-parallel rank, of a server that has several."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(
            child
            for child in children
            if re.search(rf"scheduler.*_TP{rank}(_|$)", child.cmdline()[0])
        )

    def load(self) -> dict:
        """What the scheduler holds: running and waiting requests, cache tokens in use."""
        response = requests.get(f"{self.url}/v1/loads", timeout=30)
        response.raise_for_status()
        return response.json()["loads"][0]

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Wait until no request is left and every page that is not cached is free again.

        SGLang checks its own books whenever it is idle, and ends with a memory leak report when a
        page is missing.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            load = self.load()
            if not (
                load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"]
            ):
                return
            time.sleep(0.1)
        raise AssertionError(f"still held after {timeout_s} s: {load}\n{self.tail()}")


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the test run dies without stopping it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL("libc.so.6").prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerPool:
    """At most one server at a time: memory and the two cores of a small machine hold no more."""

    def __init__(self) -> None:
        self._current: Server | None = None
        self.starts = 0

    def get(self, spec: ServerSpec) -> Server:
        """The running server if it has this spec and is alive, otherwise a new one."""
        current = self._current
        if current is not None and current.spec == spec and current.process.poll() is None:
            return current
        self.close()
        self._current = Server(spec)
        self.starts += 1
        return self._current

    def close(self) -> None:
        """Stop the running server."""
        if self._current is not None:
            self._current.stop()
            self._current = None


def server_pool() -> Iterator[ServerPool]:
    """A pool that is closed at the end; the body of a session fixture."""
    pool = ServerPool()
    try:
        yield pool
    finally:
        pool.close()
