"""EAGLE drafts change the speed of an answer, never the answer.

Two servers of one checkpoint get the same requests, the second with drafts: everything that a client
sees must agree. A third serves a checkpoint whose drafts must all be right for some tokens and all
be wrong for others.
"""

from __future__ import annotations

import socket
import time

import pytest

from tests.support.mtp_checkpoints import NEVER_FROM, aligned, counting, ring
from tests.support.mtp_simulation import simulate
from tests.support.mtp_traffic import (
    PAGE,
    WAVE,
    Request,
    accept_histogram,
    chat,
    draft_args,
    free_tokens,
    prompt,
    together,
)
from tests.support.server import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

INDEX_TOPK = 16
POOL_TOKENS, CONTEXT = 768, 7 * PAGE
#: Slots that SGLang keeps free behind a request for the drafts of its last round.
RESERVED = 6
#: Chunks of one page; the pool holds less than two requests of full length.
BASE = (
    *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)),
    *("--context-length", str(CONTEXT), "--chunked-prefill-size", str(PAGE), "--enable-metrics"),
    # Admit requests that the pool cannot hold to their end.
    *("--schedule-conservativeness", "0.05"),
)
#: SGLang counts its pages whenever it is idle, and here after every step too.
CHECKS = (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),)


def spec(model: str, steps: int = 0) -> ServerSpec:
    return ServerSpec(model=model, args=BASE + (draft_args(steps) if steps else ()), env=CHECKS)


#: More than the pool holds once all have grown. SGLang sets room aside for requests that ignore the
#: end-of-sequence token, so these do not.
CROWD = [
    Request(tuple(prompt(61, 50 + i)), 140, sampling=(("ignore_eos", False),)) for i in range(6)
]
#: End one before, at and one behind a page boundary.
BOUNDARY = [Request(tuple(prompt(40, 80)), 2 * PAGE - 40 + offset) for offset in (-1, 0, 1)]
#: As long as the context, a multiple of the page size, allows.
FULL_LENGTH = [Request(tuple(prompt(CONTEXT - RESERVED - new, new)), new) for new in (19, 20, 21)]
LOGPROBS = [
    Request(
        tuple(prompt(30, 60)),
        24,
        extra=(("return_logprob", True), ("logprob_start_len", 0), ("top_logprobs_num", 3)),
    )
]
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


def stops(server: Server) -> list[dict]:
    """A prompt that stops at a token and at a string of its own answer, and inside a draft chain."""
    base = WAVE[0]
    answer = base.send(server)
    token = answer["output_ids"][20]
    word = next(c for c in answer["text"][12:] if c.isascii() and c.isalnum())
    return [
        Request(
            base.input_ids, 48, sampling=(("stop_token_ids", (token,)), ("ignore_eos", False))
        ).send(server),
        Request(base.input_ids, 48, sampling=(("stop", word),)).send(server),
    ]


def traffic(server: Server) -> dict[str, list[dict]]:
    answers = {"free before": free_tokens(server)}
    for name, batch in (
        ("wave", WAVE),
        # Again: now every prompt finds its pages in the prefix cache.
        ("cached wave", WAVE),
        ("boundary", BOUNDARY),
        ("full length", FULL_LENGTH),
        ("logprobs", LOGPROBS),
        ("grammars", GRAMMARS),
        ("crowd", CROWD),
    ):
        answers[name] = together(server, batch)
    answers["chat"] = chat(server, turns=3, new_tokens=40)
    answers["stops"] = stops(server)
    answers["free after"] = free_tokens(server)
    return answers


@pytest.fixture(scope="module")
def answers(pool: ServerPool) -> dict[str, dict]:
    """What the server without drafts answered, and the one with them."""
    return {
        kind: traffic(pool.get(spec(aligned(INDEX_TOPK), steps)))
        for kind, steps in (("plain", 0), ("drafts", 5))
    }


@pytest.mark.parametrize(
    "name",
    [
        "wave",
        "cached wave",
        "boundary",
        "full length",
        "logprobs",
        "grammars",
        "crowd",
        "chat",
        "stops",
    ],
)
def test_answers_are_the_same(answers: dict[str, dict], name: str) -> None:
    plain, drafts = answers["plain"][name], answers["drafts"][name]
    for without, with_drafts in zip(plain, drafts, strict=True):
        assert with_drafts["output_ids"] == without["output_ids"]
        assert with_drafts["text"] == without["text"]
        assert with_drafts["meta_info"]["finish_reason"] == without["meta_info"]["finish_reason"]


def test_drafts_of_every_accept_length_occurred(answers: dict[str, dict]) -> None:
    """Or the comparison above would have compared nothing."""
    drafted = [*answers["drafts"]["wave"], *answers["drafts"]["crowd"], *answers["drafts"]["chat"]]
    histogram = [sum(rounds) for rounds in zip(*(accept_histogram(a, 5) for a in drafted))]
    assert min(histogram) > 0, histogram


@pytest.mark.parametrize("index", [1, 3, 4, 5])
def test_the_drafts_accepted_are_those_of_transformers(
    answers: dict[str, dict], index: int
) -> None:
    """Round by round: catches a draft that is worse than it should be, which no text shows."""
    request, answer = WAVE[index], answers["drafts"]["wave"][index]
    expected = simulate(
        aligned(INDEX_TOPK), list(request.input_ids), request.max_new_tokens, 5, share=True
    )
    assert answer["output_ids"] == expected.token_ids[: request.max_new_tokens]
    assert accept_histogram(answer, 5) == expected.histogram(5)


def test_logprobs_are_the_same(answers: dict[str, dict]) -> None:
    without, with_drafts = (
        answers[kind]["logprobs"][0]["meta_info"] for kind in ("plain", "drafts")
    )
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert len(with_drafts[name]) == len(without[name])
        for ours, theirs in zip(with_drafts[name][1:], without[name][1:], strict=True):
            assert ours[1] == theirs[1]
            assert ours[0] == pytest.approx(theirs[0], abs=2e-5)
    for ours, theirs in zip(
        with_drafts["output_top_logprobs"], without["output_top_logprobs"], strict=True
    ):
        assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]


def test_grammars_were_obeyed(answers: dict[str, dict]) -> None:
    regex, schema = answers["drafts"]["grammars"]
    assert regex["text"][0] in "abc"
    assert schema["text"].startswith("{")


def test_a_pool_too_small_retracts_and_finishes(answers: dict[str, dict]) -> None:
    for kind in ("plain", "drafts"):
        retractions = [answer["meta_info"]["num_retractions"] for answer in answers[kind]["crowd"]]
        assert sum(retractions) > 0, kind


def test_a_chat_finds_the_same_prefix(answers: dict[str, dict]) -> None:
    cached = {
        kind: [answer["meta_info"]["cached_tokens"] for answer in answers[kind]["chat"]]
        for kind in answers
    }
    assert cached["drafts"] == cached["plain"]
    assert cached["plain"] == [0, 64, 192]


def test_pages_return(answers: dict[str, dict]) -> None:
    assert answers["drafts"]["free after"] == answers["drafts"]["free before"]
    assert answers["plain"]["free after"] == answers["plain"]["free before"]


@pytest.fixture(scope="module")
def counter(pool: ServerPool) -> Server:
    return pool.get(spec(counting(), 5))


@pytest.mark.parametrize("start", [10, NEVER_FROM - 40])
def test_a_perfect_draft_is_always_accepted(counter: Server, start: int) -> None:
    tokens = ring(start, 30 + 61)
    answer = Request(tuple(tokens[:30]), 61).send(counter)
    assert answer["output_ids"] == tokens[30:]
    # One token by prefill, then ten rounds of five drafts and the target's own token.
    assert answer["meta_info"]["spec_correct_drafts_histogram"] == [0, 0, 0, 0, 0, 10]
    assert answer["meta_info"]["spec_accept_rate"] == 1.0


def test_a_broken_draft_is_never_accepted(counter: Server) -> None:
    tokens = ring(NEVER_FROM + 5, 90 + 40)
    answer = Request(tuple(tokens[:90]), 40).send(counter)
    assert answer["output_ids"] == tokens[90:]
    assert answer["meta_info"]["spec_correct_drafts_histogram"] == [39]
    assert answer["meta_info"]["spec_num_correct_drafts"] == 0


@pytest.mark.parametrize("ends_at", [2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
@pytest.mark.parametrize("start", [20, NEVER_FROM])
def test_pages_return_at_boundaries(counter: Server, start: int, ends_at: int) -> None:
    """Finish by length and by stop, with every draft accepted and with none."""
    before = free_tokens(counter)
    tokens = ring(start, ends_at + 1)
    together(
        counter,
        [
            Request(tuple(tokens[:40]), ends_at - 40),
            Request(
                tuple(tokens[:41]),
                200,
                sampling=(("stop_token_ids", (tokens[ends_at],)), ("ignore_eos", False)),
            ),
        ],
    )
    assert free_tokens(counter) == before


def test_pages_return_after_abort_and_disconnect(counter: Server) -> None:
    before = free_tokens(counter)
    disconnect_while_streaming(counter, ring(NEVER_FROM, 100))
    # An abort while its prompt is still being chunked, and one while it is decoded.
    for delay in (0.0, 1.0):
        disconnect_while_streaming(counter, ring(20, 200), read=False)
        time.sleep(delay)
        counter.post("/abort_request", abort_all=True)
    time.sleep(2)
    assert free_tokens(counter) == before
    tokens = ring(20, 40)
    assert Request(tuple(tokens[:30]), 10).send(counter)["output_ids"] == tokens[30:]


def disconnect_while_streaming(server: Server, input_ids: list[int], *, read: bool = True) -> None:
    """Start a long answer, read its beginning, and go."""
    body = (
        f'{{"input_ids": {input_ids}, "stream": true, '
        '"sampling_params": {"temperature": 0, "ignore_eos": true, "max_new_tokens": 200}}'
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        if read:
            connection.recv(200)
