"""A prefill server of two ranks that share one cache by pages, and a decode server: what one would say.

The ranks take the rows of a prefill in turn, before one decode process; the last test has all rows on every
rank, before two (T12, T27).

test_lengths            around a page, a chunk and index_topk: log-probabilities of prompt and text are
                        transformers'; each chunk gathers those before it, each rank hands over its pages
test_hits               a cached prefix that ends before, at and behind a page's end, shorter and longer
                        than index_topk
test_batch              several requests at once, two of them with the same prefix
test_more_than_a_rank   prompts that no rank could hold alone, each evicting the one before
test_half               each rank allocates half of what one would, and the scratch is bounded
test_all_rows           every rank has all rows of a prefill: one prompt in chunks, and a hit in it
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from sglang_glm.config import GlmDsaConfig
from sglang_glm.verification.compare import merge_comparisons
from tests.support.checkpoints import checkpoint
from tests.support.disaggregation import PREFILL_TOKENS, Pair, pair
from tests.support.parity import check, compare, prompt
from tests.support.server import ServerPool, ServerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="NIXL moves the cache: pip install '.[disaggregation]'",
    ),
]

MODEL = checkpoint("--mtp", "--index-topk", "16")
STOPPED = SimpleNamespace(spec=ServerSpec(MODEL))
CONTEXT = 4096
SHARDED = ("--enable-kv-cache-sharding", "--context-length", str(CONTEXT))
IN_TURN = ("--enable-prefill-cp", "--attn-cp-size", "2", "--cp-strategy", "interleave")

LENGTHS = (1, 16, 17, 64, 65, 128, 129, 500)
#: Positions that two prompts share.
HITS = (63, 64, 65, 129, 447)
#: More than a rank's pool, less than decode's; without near-ties for the seeds that are used.
LONG = PREFILL_TOKENS + 76


@dataclass(frozen=True)
class Answer:
    """One request, and what both servers said."""

    ids: list[int]
    prefill: dict
    decode: dict

    @property
    def cached(self) -> int:
        return self.prefill["meta_info"]["cached_tokens"]


def ask(servers: Pair, ids: list[int], start: int = 0) -> Answer:
    """Greedy text with log-probabilities; no prefix beyond `start` is reused."""
    answers = servers.post(
        {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": 5,
        }
    )
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return Answer(ids, *(answer.json() for answer in answers))


def ask_again(servers: Pair, ids: list[int]) -> Answer:
    """The same, from whatever is cached."""
    return ask(servers, ids, start=len(ids) - 1)


def converse(servers: Pair) -> dict[str, list[Answer]]:
    """Everything that is asked of a pair."""
    new = lambda length, seed: prompt(STOPPED, length, seed)
    said = {"lengths": [ask(servers, new(length, length)) for length in LENGTHS], "hits": []}
    for shared in HITS:
        first = new(600, 1000 + shared)
        ask_again(servers, first)
        said["hits"].append(ask_again(servers, first[:shared] + new(30, 2000)))
    first = new(300, 1)
    ask_again(servers, first)
    batch = [first[:256] + new(20, 2), new(70, 3), first[:128] + new(90, 4), new(5, 5)]
    with ThreadPoolExecutor(len(batch)) as threads:
        said["batch"] = list(threads.map(lambda ids: ask_again(servers, ids), batch))
    long = [new(LONG, seed) for seed in (1, 2)]
    said["long"] = [ask_again(servers, ids) for ids in (*long, long[0])]
    servers.decode.wait_idle()
    # What SGLang calls used is by the rank with the fewest free pages, so that it need not be 0; its books
    # of all pages, which it checks when it is idle, end the server when one is missing.
    time.sleep(2)
    assert servers.prefill.load()["num_running_reqs"] == 0
    assert servers.prefill.process.poll() is None
    return said


@pytest.fixture(scope="module")
def said(pool: ServerPool) -> dict:
    """What a pair said, and the prefill server's log; the oracle runs when both have stopped."""
    pool.close()
    with pair(MODEL, prefill=("--tp", "2", *SHARDED, *IN_TURN), patience_s=60) as servers:
        return {**converse(servers), "log": servers.prefill.log}


def check_all(answers: Iterable[Answer]) -> None:
    """Prompt and first token are prefill's, the text is decode's; both are transformers'."""
    check(
        merge_comparisons(
            compare(STOPPED, half, answer.ids)
            for answer in answers
            for half in (answer.prefill, answer.decode)
        )
    )


def test_lengths(said: dict) -> None:
    assert [len(answer.ids) for answer in said["lengths"]] == list(LENGTHS)
    for answer in said["lengths"]:
        assert len(answer.prefill["meta_info"]["input_token_logprobs"]) == len(answer.ids)
        assert len(answer.decode["output_ids"]) == 8
    check_all(said["lengths"])


def test_hits(said: dict) -> None:
    assert [answer.cached for answer in said["hits"]] == [shared // 64 * 64 for shared in HITS]
    check_all(said["hits"])


def test_batch(said: dict) -> None:
    assert [answer.cached for answer in said["batch"]] == [256, 0, 128, 0]
    check_all(said["batch"])


def test_more_than_a_rank(said: dict) -> None:
    first, second, again = (answer.cached for answer in said["long"])
    # The batch began with the same 300 tokens as the first of them.
    assert (first, second) == (256, 0)
    # Both do not fit: what is found again has lost pages to the other.
    assert again % 64 == 0 and again < LONG // 64 * 64
    check_all(said["long"])


def test_half(said: dict) -> None:
    config = GlmDsaConfig.from_hf(json.loads(Path(MODEL, "config.json").read_text()))
    full_layers = sum(config.has_indexer(layer) for layer in range(config.num_hidden_layers))
    slot_bytes = 4 * (config.num_hidden_layers * 576 + full_layers * 128)
    found = re.findall(
        r"Sharded cache, rank (\d) of 2: (\d+) tokens in (\d+) bytes, scratch (\d+) bytes",
        said["log"],
    )
    assert sorted(rank for rank, *_ in found) == ["0", "1"]
    both_hold = 2 * PREFILL_TOKENS
    for _, tokens, stored, scratch in found:
        assert 2 * int(tokens) == both_hold
        # Beside its half each has a page for padding, as one rank has.
        assert int(stored) - 64 * slot_bytes == both_hold * slot_bytes // 2
        # Two halves of one layer: eight contexts of cached positions, SGLang's bound, and a chunk.
        assert int(scratch) == 2 * (8 * CONTEXT + 128) * 4 * (576 + 128)


def test_all_rows(pool: ServerPool) -> None:
    pool.close()
    ids = prompt(STOPPED, 300, 300)
    with pair(MODEL, "--tp", "2", prefill=SHARDED, patience_s=60) as servers:
        answers = [ask(servers, ids), ask_again(servers, ids[:200] + prompt(STOPPED, 30, 2000))]
    assert [answer.cached for answer in answers] == [0, 192]
    check_all(answers)
