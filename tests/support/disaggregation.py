"""A prefill and a decode server, and requests that go to both as a router sends them."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_glm.verification.local_server import free_port
from tests.support.server import Server, ServerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests

BASE = (
    *("--dtype", "float32", "--chunked-prefill-size", "128"),
    *("--disaggregation-transfer-backend", "nixl"),
)
PREFILL_TOKENS, DECODE_TOKENS = 1024, 1536
#: Decode hears nothing of a prompt that prefill refused: it gives up after this time. The default is 300 s.
PATIENCE_S = 8
ROOMS = itertools.count(1)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server of one checkpoint."""

    prefill: Server
    decode: Server
    bootstrap_port: int

    def post(self, body: dict) -> tuple[requests.Response, requests.Response]:
        """Send one request to both, as a router does; the answers of prefill and decode."""
        body = {
            **body,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(ROOMS),
        }
        with ThreadPoolExecutor(2) as threads:
            sent = [
                threads.submit(server.post, "/generate", **body)
                for server in (self.prefill, self.decode)
            ]
            return sent[0].result(), sent[1].result()

    def generate(self, ids: list[int], *, logprobs: bool = True, **sampling: object) -> dict:
        """Greedy text of the pair."""
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
        body = {"input_ids": ids, "sampling_params": params}
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 5}
        answers = self.post(body)
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return answers[1].json()

    def wait_idle(self) -> None:
        self.prefill.wait_idle()
        self.decode.wait_idle()


@contextlib.contextmanager
def pair(
    model: str, *args: str, prefill: tuple[str, ...] = (), patience_s: int = PATIENCE_S
) -> Iterator[Pair]:
    """Both servers for a while.

    Args:
        model: The checkpoint.
        args: Of both.
        prefill: Of the prefill server alone.
        patience_s: How long decode waits for a prefill.
    """
    port = free_port()
    roles = {
        "prefill": ("--max-total-tokens", str(PREFILL_TOKENS), *prefill),
        # Admit requests that the pool cannot hold to their end.
        "decode": (
            *("--max-total-tokens", str(DECODE_TOKENS), "--num-reserved-decode-tokens", "8"),
            *("--schedule-conservativeness", "0.05"),
        ),
    }
    specs = [
        ServerSpec(
            model,
            (
                *BASE,
                *("--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(port)),
                *pool_args,
                *args,
            ),
            (("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(patience_s)),),
        )
        for role, pool_args in roles.items()
    ]
    with ThreadPoolExecutor(2) as threads:
        starting = [threads.submit(Server, spec) for spec in specs]
        servers = []
        try:
            servers = [future.result() for future in starting]
            yield Pair(*servers, bootstrap_port=port)
        finally:
            for future in starting:
                with contextlib.suppress(Exception):
                    future.result().stop()
