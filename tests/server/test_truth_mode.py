"""FP32 serving equals transformers in FP32: every log-probability of prompt and output.

test_lengths            prompts shorter and longer than index_topk, chunked in up to 17 pieces
test_batch              ragged batch: each as alone
test_crossing           decode that walks across index_topk
test_prefix_hit         full and partial hits, shorter and longer than index_topk, then decode
test_repeatable         the same prompt alone and inside batches gives the same tokens
"""

import pytest

from tests.support.parity import check, clean_prompt, compare, compare_all, prompt
from tests.support.server import Server
from tests.support.specs import TRUTH_8, TRUTH_64

SERVERS = {8: TRUTH_8, 64: TRUTH_64}

each_topk = pytest.mark.parametrize(
    "server", SERVERS.values(), ids=[f"topk{t}" for t in SERVERS], indirect=True
)


def index_topk(server: Server) -> int:
    return next(topk for topk, spec in SERVERS.items() if spec == server.spec)


@each_topk
@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 500, 2100])
def test_lengths(server: Server, length: int) -> None:
    server.flush_cache()
    ids = clean_prompt(server, length)
    check(compare(server, server.generate(ids), ids))


@each_topk
def test_batch(server: Server) -> None:
    server.flush_cache()
    prompts = [clean_prompt(server, length) for length in (5, 64, 130, 700, 3, 65)]
    check(compare_all(server, prompts))


@each_topk
def test_crossing(server: Server) -> None:
    topk = index_topk(server)
    ids = prompt(server, topk - 3, seed=77)
    check(compare(server, server.generate(ids, max_new_tokens=12), ids))


@each_topk
@pytest.mark.parametrize("shared", [63, 64, 65, 128, 320])
def test_prefix_hit(server: Server, shared: int) -> None:
    server.flush_cache()
    first = prompt(server, shared + 40, seed=31)
    second = first[:shared] + prompt(server, 50, seed=32)
    server.generate(first)
    # A prefix is reused only up to the first position whose log-probability is asked for.
    answer = server.generate(second, logprob_start_len=shared + 1, max_new_tokens=16)
    assert answer["meta_info"]["cached_tokens"] == shared // 64 * 64
    check(compare(server, answer, second))


@each_topk
def test_repeatable(server: Server) -> None:
    ids = prompt(server, 300, seed=5)
    alone = server.generate(ids, max_new_tokens=24)["output_ids"]
    others = [prompt(server, length, seed=40 + length) for length in (10, 200, 90)]
    for batch in ([ids, *others], [*others, ids], [ids, ids]):
        answers = server.generate(batch, max_new_tokens=24)
        assert all(
            a["output_ids"] == alone for a, b in zip(answers, batch, strict=True) if b == ids
        )
