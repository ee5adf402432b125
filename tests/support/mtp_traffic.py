"""The same requests for a server with drafts and one without, and what each answered."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from tests.support.server import Server

PAGE = 64


def prompt(length: int, seed: int, vocab: int = 1000) -> list[int]:
    return [random.Random(f"{length}:{seed}:{i}").randrange(vocab) for i in range(length)]


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request; `extra` joins the body, `sampling` the sampling parameters."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: tuple[tuple[str, object], ...] = ()
    extra: tuple[tuple[str, object], ...] = ()

    def send(self, server: Server) -> dict:
        sampling = {
            "temperature": 0,
            "ignore_eos": True,
            "max_new_tokens": self.max_new_tokens,
            **dict(self.sampling),
        }
        response = server.post(
            "/generate",
            input_ids=list(self.input_ids),
            sampling_params=sampling,
            **dict(self.extra),
        )
        assert response.status_code == 200, response.text
        return response.json()


#: Prompts within and beyond index_topk (16), and around a page and a chunk; the batch shrinks as
#: they finish, and two of them cross index_topk while they are decoded.
WAVE = [
    Request(tuple(prompt(length, seed)), new)
    for seed, (length, new) in enumerate(
        [(3, 48), (12, 9), (63, 70), (64, 25), (65, 17), (150, 60)]
    )
]


def draft_args(steps: int) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)),
    )


def accept_histogram(answer: dict, steps: int) -> list[int]:
    """Rounds with 0, 1, ... `steps` correct drafts; SGLang leaves zeros at the end out."""
    counts = answer["meta_info"]["spec_correct_drafts_histogram"]
    return counts + [0] * (steps + 1 - len(counts))


def together(server: Server, batch: list[Request]) -> list[dict]:
    """Send all at once; they leave as they finish."""
    with ThreadPoolExecutor(len(batch)) as threads:
        return list(threads.map(lambda request: request.send(server), batch))


def chat(server: Server, turns: int, new_tokens: int) -> list[dict]:
    """A conversation: each turn's prompt is all that was said, and something new."""
    said, answers = [], []
    for turn in range(turns):
        said = said + prompt(70, 1000 + turn)
        answer = Request(tuple(said), new_tokens).send(server)
        said = said + answer["output_ids"]
        answers.append(answer)
    return answers


def free_tokens(server: Server) -> int:
    """Slots that are free or hold only cached prefixes, as SGLang counts them.

    The gauges move with prefill batches, so a request of one new page is sent first; it is the same
    whenever this is called.
    """
    Request(tuple(prompt(7, 7, vocab=400)), 1).send(server)
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    gauges = dict(re.findall(r"^sglang:(kv_\w+_tokens)\{.*\} ([\d.e+]+)$", text, re.MULTILINE))
    return round(float(gauges["kv_available_tokens"]) + float(gauges["kv_evictable_tokens"]))
