"""A real SGLang server, for as long as tests need it, and what they ask of it."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import TYPE_CHECKING

import psutil
import requests

from sglang_glm.verification.local_server import LocalServer

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_TIMEOUT_S = 240


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """What a server is started with. Tests with an equal spec share one server."""

    model: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


class Server(LocalServer):
    """A server with a spec."""

    def __init__(self, spec: ServerSpec, *, ready_timeout_s: float = READY_TIMEOUT_S) -> None:
        self.spec = spec
        super().__init__(
            ["--model-path", spec.model, *spec.args],
            # Two threads on two cores stall each other as soon as anything else runs beside them.
            env={"OMP_NUM_THREADS": "1", **os.environ, **dict(spec.env)},
            ready_timeout_s=ready_timeout_s,
        )

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
