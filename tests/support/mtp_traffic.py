"""The same requests for a server with drafts and one without, and what each answered."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from tests.support.server import Server

PAGE = 64
INDEX_TOPK = 16
POOL_TOKENS, CONTEXT = 12 * PAGE, 4 * PAGE
#: Slots that SGLang keeps free behind a request for the drafts of its last round.
RESERVED = 6
#: Chunks of one page; the pool holds less than four requests of full length.
ARGS = (
    *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)),
    *("--context-length", str(CONTEXT), "--chunked-prefill-size", str(PAGE)),
    # Admit requests that the pool cannot hold to their end.
    *("--schedule-conservativeness", "0.05"),
    *("--enable-metrics", "--decode-log-interval", "4"),
)
ENV = (
    # SGLang counts its pages whenever it is idle, and here after every step too.
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),
    ("SGLANG_ENABLE_METRICS_DEVICE_TIMER", "1"),
)


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


#: Prompts within and beyond index_topk, and around a page and a chunk; the batch shrinks as they
#: finish, and two of them cross index_topk while they are decoded.
WAVE = [
    Request(tuple(prompt(length, seed)), new)
    for seed, (length, new) in enumerate(
        [(3, 48), (12, 9), (63, 70), (64, 25), (65, 17), (150, 60)]
    )
]
#: Prompts of the wave again, which now find their pages in the prefix cache.
CACHED = [Request(WAVE[index].input_ids, 20) for index in (3, 4, 5)]
#: As long as the context, a multiple of the page size, allows.
FULL_LENGTH = [Request(tuple(prompt(CONTEXT - RESERVED - new, new)), new) for new in (19, 20, 21)]
#: More than the pool holds once all have grown. SGLang sets room aside for requests that ignore the
#: end-of-sequence token, so these do not.
CROWD = [
    Request(tuple(prompt(61, 50 + i)), 90, sampling=(("ignore_eos", False),)) for i in range(6)
]
LOGPROBS = Request(
    tuple(prompt(30, 60)),
    24,
    extra=(("return_logprob", True), ("logprob_start_len", 0), ("top_logprobs_num", 3)),
)
GRAMMARS = [
    Request(
        tuple(prompt(20, 70)),
        40,
        sampling=(("regex", r"[a-c]{7}(x|yy)[0-9]{4,9}"), ("ignore_eos", False)),
    ),
    Request(
        tuple(prompt(25, 71)),
        40,
        sampling=(
            (
                "json_schema",
                '{"type": "object", "properties": {"n": {"enum": [12345, 12399]}}, "required": ["n"]}',
            ),
            ("ignore_eos", False),
        ),
    ),
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


def with_top_two(request: Request) -> Request:
    """The request, asking for the two likeliest tokens of every output position too."""
    extra = (("return_logprob", True), ("top_logprobs_num", 2))
    return Request(request.input_ids, request.max_new_tokens, request.sampling, extra)


def stops(answer: dict) -> list[Request]:
    """Requests that stop at a token and at a string of the wave's first answer, amid its drafts."""
    ids = WAVE[0].input_ids
    token = answer["output_ids"][20]
    word = next(c for c in answer["text"][12:] if c.isascii() and c.isalnum())
    return [
        Request(ids, 48, sampling=(("stop_token_ids", (token,)), ("ignore_eos", False))),
        Request(ids, 48, sampling=(("stop", word),)),
    ]


def traffic(server: Server) -> dict[str, list[dict]]:
    """Send everything; returns the answers by name."""
    answers = {
        name: together(server, batch)
        for name, batch in (
            ("wave", WAVE),
            ("cached", CACHED),
            ("full length", FULL_LENGTH),
            ("crowd", CROWD),
        )
    }
    mixed = together(server, [LOGPROBS, *GRAMMARS, *stops(answers["wave"][0])])
    answers |= {"logprobs": mixed[:1], "grammars": mixed[1:3], "stops": mixed[3:]}
    answers["chat"] = chat(server, turns=3, new_tokens=8)
    return answers


#: What must not depend on drafts.
_KEPT = ("finish_reason", "cached_tokens", "input_token_logprobs", "output_token_logprobs")


def reduced(answer: dict) -> dict:
    """The part of an answer that is the same with drafts and without, up to rounding."""
    meta = {name: answer["meta_info"][name] for name in _KEPT if name in answer["meta_info"]}
    top = answer["meta_info"].get("output_top_logprobs")
    if top is not None:
        meta["output_top_ids"] = [[token for _, token, _ in row] for row in top]
    return {"output_ids": answer["output_ids"], "text": answer["text"], "meta_info": meta}


#: Answers of a server without drafts, and the drafts accepted in transformers; see `make_mtp_golden`.
GOLDEN = Path(__file__).parents[1] / "golden" / f"mtp_topk{INDEX_TOPK}.json"


def golden() -> dict:
    """What every server of `aligned(INDEX_TOPK)` must answer."""
    return json.loads(GOLDEN.read_text())


def metric(server: Server, name: str, **labels: str) -> float:
    """Sum of a metric's series that have `labels`."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    found = [
        float(value)
        for series, value in re.findall(rf"^sglang:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        if all(f'{label}="{wanted}"' in series for label, wanted in labels.items())
    ]
    if not found:
        raise AssertionError(f"/metrics has no sglang:{name} with {labels}")
    return sum(found)


def swap_weights(server: Server, checkpoint: str) -> None:
    """Load other weights of the same shapes into target and MTP layer."""
    server.wait_idle()
    # SGLang tries to flush once, and the last request may still be leaving; this tries again.
    answer = server.post(
        "/update_weights_from_disk", model_path=checkpoint, flush_cache=False
    ).json()
    assert answer["success"], answer["message"]
    server.flush_cache()
