"""EAGLE drafts change the speed of an answer, never the answer.

One server with drafts answers what a server without drafts and transformers answered
(`tests/golden/mtp_topk16.json`; `test_mtp_matrix.py` asks both again). Then its weights are exchanged
for some whose drafts are right by script (T15, T17, T33, T44).

test_answers_are_the_same        texts, stops, grammars, chat, a crowd, full contexts
test_the_drafts_accepted_*       round by round as transformers: a worse draft shows in no text
test_logprobs_*                  of prompt and answer, rejected drafts between them
test_grammars_*                  constrained answers parse
test_a_pool_too_small_*          retraction in the middle of a round
test_a_chat_*                    the prefix cache, which stores pairs of tokens here
test_scripted_accepts            every accept length, in a batch that shrinks
test_pages_return_*              finish by length and by stop around a page's end; abort, disconnect
test_metrics                     accept length, rounds and draft time
test_the_weights_*               the first weights, loaded again, answer as at first
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.mtp_checkpoints import aligned
from tests.support.mtp_scripted import Script, accepts, scripted, walk
from tests.support.mtp_traffic import (
    INDEX_TOPK,
    PAGE,
    WAVE,
    Request,
    accept_histogram,
    golden,
    metric,
    prompt,
    reduced,
    swap_weights,
    together,
    traffic,
)
from tests.support.specs import DRAFTS_16

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server import Server, ServerPool

pytestmark = pytest.mark.server
SERVER = DRAFTS_16
STEPS = 5


@pytest.fixture(scope="module")
def answers(pool: ServerPool) -> dict[str, list[dict]]:
    server = pool.get(SERVER)
    answered = traffic(server)
    server.wait_idle()
    return answered


@pytest.fixture(scope="module")
def expected() -> dict:
    return golden()


@pytest.mark.parametrize(
    "name",
    ["wave", "cached", "full length", "crowd", "logprobs", "grammars", "stops", "chat"],
)
def test_answers_are_the_same(
    server: Server, answers: dict[str, list[dict]], expected: dict, name: str
) -> None:
    for got, plain in zip(answers[name], expected["answers"][name], strict=True):
        assert got["output_ids"] == plain["output_ids"]
        assert got["text"] == plain["text"]
        assert got["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


def test_the_drafts_accepted_are_those_of_transformers(
    server: Server, answers: dict[str, list[dict]], expected: dict
) -> None:
    """Catches a draft that is worse than it should be, which no text shows."""
    counts = [0] * (STEPS + 1)
    for answer, rounds in zip(answers["wave"], expected["accepted"], strict=True):
        histogram = [rounds.count(count) for count in range(STEPS + 1)]
        assert accept_histogram(answer, STEPS) == histogram
        counts = [a + b for a, b in zip(counts, histogram, strict=True)]
    # Or the comparison would have compared little. Scripts force rounds that are right throughout.
    assert min(counts[:STEPS]) > 0, counts


def test_logprobs_are_the_same(
    server: Server, answers: dict[str, list[dict]], expected: dict
) -> None:
    got = reduced(answers["logprobs"][0])["meta_info"]
    plain = expected["answers"]["logprobs"][0]["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        for ours, theirs in zip(got[name], plain[name], strict=True):
            assert ours[1] == theirs[1]
            assert ours[0] == pytest.approx(theirs[0], abs=2e-5)
    assert got["output_top_ids"] == plain["output_top_ids"]


def test_grammars_were_obeyed(server: Server, answers: dict[str, list[dict]]) -> None:
    regex, schema = answers["grammars"]
    assert regex["text"][0] in "abc"
    assert schema["text"].startswith("{")


def test_a_pool_too_small_retracts_and_finishes(
    server: Server, answers: dict[str, list[dict]]
) -> None:
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers["crowd"]) > 0


def test_a_chat_finds_the_prefix_that_it_finds_without_drafts(
    server: Server, answers: dict[str, list[dict]], expected: dict
) -> None:
    cached, plain = (
        [answer["meta_info"]["cached_tokens"] for answer in chat]
        for chat in (answers["chat"], expected["answers"]["chat"])
    )
    assert cached == plain == [0, 64, 128]
    assert answers["cached"][-1]["meta_info"]["cached_tokens"] == 2 * PAGE


@pytest.fixture(scope="module")
def scripts(pool: ServerPool) -> Iterator[dict]:
    """The script whose weights the server holds; its own come back for whoever uses it next."""
    loaded = {"script": None}
    yield loaded
    if loaded["script"] is not None:
        swap_weights(pool.get(SERVER), aligned(INDEX_TOPK))


def follow(server: Server, scripts: dict, script: Script) -> None:
    if scripts["script"] != script:
        swap_weights(server, scripted(script, INDEX_TOPK))
        scripts["script"] = script


@pytest.mark.parametrize("script", ["right", "mixed", "wrong"])
def test_scripted_accepts(server: Server, scripts: dict, script: Script) -> None:
    """A perfect MTP layer is right at every position, a broken one never, one of both as foretold."""
    follow(server, scripts, script)
    shapes = {
        "right": [(30, 61), (3, 25)],
        "mixed": [(3, 20), (100, 50), (12, 40), (40, 30)],
        "wrong": [(90, 12), (14, 6)],
    }[script]
    batch = [Request(tuple(prompt(length, 300 + length)), new) for length, new in shapes]
    counts = [0] * (STEPS + 1)
    for request, answer in zip(batch, together(server, batch), strict=True):
        ids, new = list(request.input_ids), request.max_new_tokens
        assert answer["output_ids"] == walk(ids, new)
        rounds = accepts(ids, new, STEPS, script)
        histogram = [rounds.count(count) for count in range(STEPS + 1)]
        assert accept_histogram(answer, STEPS) == histogram
        counts = [a + b for a, b in zip(counts, histogram, strict=True)]
    occurred = {count for count, rounds in enumerate(counts) if rounds}
    assert occurred == {"right": {5}, "mixed": {0, 1, 2, 3, 4, 5}, "wrong": {0}}[script]


@pytest.mark.parametrize("script", ["right", "mixed", "wrong"])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_pages_return_at_boundaries(
    server: Server, scripts: dict, finish: str, script: Script
) -> None:
    """Finish one before, at and one behind the end of a page."""
    follow(server, scripts, script)
    server.flush_cache()
    batch = []
    for ends_at in (2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1):
        ids = prompt(2 * PAGE - 9, ends_at)
        text = walk(ids, ends_at - len(ids))
        request = Request(tuple(ids), len(text))
        if finish == "stop":
            stop = (("stop_token_ids", (text[-1],)), ("ignore_eos", False))
            request = Request(tuple(ids), 100, sampling=stop)
            text = text[: text.index(text[-1]) + 1]
        batch.append((request, text))
    answers = together(server, [request for request, _ in batch])
    for answer, (_, text) in zip(answers, batch, strict=True):
        assert answer["output_ids"] == text
        assert answer["meta_info"]["finish_reason"]["type"] == finish
    # Every page is free or holds a cached prefix.
    server.wait_idle()
    # What is cached holds no rejected draft: the texts go on as they should.
    longer = [Request((*request.input_ids, *text, 5), 8) for request, text in batch]
    for request, answer in zip(longer, together(server, longer), strict=True):
        assert answer["meta_info"]["cached_tokens"] >= PAGE
        assert answer["output_ids"] == walk(list(request.input_ids), 8)


def test_metrics(server: Server, scripts: dict) -> None:
    """Accept length, rounds and draft time, for one answer and for the server."""

    def counters() -> dict[str, float]:
        seconds = {
            category: metric(server, "forward_execution_seconds_total", category=category)
            for category in ("decode", "target_verify", "extend")
        }
        return seconds | {"rounds": metric(server, "spec_verify_calls_total")}

    follow(server, scripts, "right")
    Request(tuple(prompt(20, 1)), 7).send(server)
    before = counters()
    meta = Request(tuple(prompt(30, 2)), 61).send(server)["meta_info"]
    after = counters()
    # One token by prefill, then ten rounds of five drafts and the target's own token.
    assert meta["spec_verify_ct"] == 10
    assert meta["spec_num_proposed_drafts"] == meta["spec_num_correct_drafts"] == 50
    assert meta["spec_accept_rate"] == 1.0
    assert meta["spec_accept_length"] == 6.1
    assert after["rounds"] - before["rounds"] == 10
    assert metric(server, "spec_accept_length") == 6.0
    assert metric(server, "spec_accept_rate") == 1.0
    assert metric(server, "spec_num_steps") == STEPS
    # With drafts on, "decode" is the draft steps alone; draft extend counts as "extend".
    assert all(after[name] > before[name] for name in after)


def test_pages_return_after_abort_and_disconnect(server: Server, scripts: dict) -> None:
    follow(server, scripts, "mixed")
    disconnect_while_streaming(server, prompt(100, 5))
    # An abort while its prompt is still being chunked, and one while it is decoded.
    for delay in (0.0, 0.7):
        disconnect_while_streaming(server, prompt(200, 6), read=False)
        time.sleep(delay)
        server.post("/abort_request", abort_all=True)
    server.wait_idle()
    ids = prompt(30, 7)
    assert Request(tuple(ids), 10).send(server)["output_ids"] == walk(ids, 10)


def disconnect_while_streaming(server: Server, input_ids: list[int], *, read: bool = True) -> None:
    """Start a long answer, read its beginning, and go."""
    body = (
        f'{{"input_ids": {input_ids}, "stream": true, '
        '"sampling_params": {"temperature": 0, "ignore_eos": true, "max_new_tokens": 150}}'
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        if read:
            connection.recv(200)


def test_the_weights_are_the_first_again(server: Server, scripts: dict, expected: dict) -> None:
    swap_weights(server, aligned(INDEX_TOPK))
    scripts["script"] = None
    answer = WAVE[1].send(server)
    assert answer["output_ids"] == expected["answers"]["wave"][1]["output_ids"]
