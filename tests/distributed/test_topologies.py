"""Two ranks answer as one process does: every log-probability within FP32 rounding of transformers.

The checkpoint scales its routed experts by 2.5, so a topology that applies the factor twice or not at
all fails every test here (T37).

test_alone          one request: the other attention-DP rank has none in prefill, decode, verify and
                    draft extend (T18, T36)
test_batches        2, 3 and 5 requests at once: rows that do not divide over ranks (T19)
test_one_busy_rank  requests sent to one rank, the other empty; then a long prompt in chunks beside short decodes
test_repeatable     20 times alone and in batches: the same tokens; under TP each selection is compared
                    between ranks while that runs (T41)
test_prefix_hit     a cached prefix is found on the rank that holds it, also in stripes over ranks (T24)
test_drafts         the text of the target alone, and as many drafts accepted as in one process
test_lost_rank      a killed rank ends the server within seconds, with the reason in the log, mid-request
test_stopped_rank   a rank that stands still during a forward ends it by SGLang's watchdog
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from sglang_glm.verification.compare import merge_comparisons
from tests.support.checkpoints import checkpoint
from tests.support.mtp_checkpoints import aligned
from tests.support.mtp_simulation import simulate
from tests.support.mtp_traffic import WAVE, accept_histogram, together
from tests.support.parity import check, compare, compare_all, prompt
from tests.support.server import Server, ServerSpec

MODEL = checkpoint("--mtp", "--index-topk", "16")
#: Most of its drafts are accepted.
DRAFTED = aligned(16)
ONE = ("--dtype", "float32", "--chunked-prefill-size", "256", "--max-total-tokens", "8192")
BASE = (*ONE, "--tp", "2")
_DRAFTS = ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1")
CHAIN_OF_3 = (*_DRAFTS, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4")
#: Three rows a request: an odd number over two ranks.
CHAIN_OF_2 = (*_DRAFTS, "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3")
CHECKED = (("SGLANG_GLM_CHECK_INDEX_AGREEMENT", "1"),)
WHOLE_SCAN = (*CHECKED, ("SGLANG_GLM_DIVIDE_INDEX_SCAN", "off"))
DIVIDED_SCAN = (*CHECKED, ("SGLANG_GLM_DIVIDE_INDEX_SCAN", "on"))
#: The second stage starts on a shared index layer, within a run of three.
SHARED_START = (("SGLANG_PP_LAYER_PARTITION", "4,4"),)
WATCHDOG_S = 10

#: The first two are part of every run; the others of `make test-all`.
TOPOLOGIES = {
    "tp2": ServerSpec(MODEL, BASE, DIVIDED_SCAN),
    "tp2_dp2_ep2": ServerSpec(MODEL, (*BASE, "--attn-dp-size", "2", "--ep-size", "2")),
    "tp2_ep2": ServerSpec(MODEL, (*BASE, "--ep-size", "2"), WHOLE_SCAN),
    "tp2_dp2_head": ServerSpec(MODEL, (*BASE, "--attn-dp-size", "2", "--enable-dp-lm-head")),
    "tp2_dp2_gatherv": ServerSpec(
        MODEL, (*BASE, "--attn-dp-size", "2"), (("SGLANG_DP_USE_GATHERV", "1"),)
    ),
    "tp2_a2a": ServerSpec(MODEL, (*BASE, "--moe-a2a-backend", "glm_a2a"), CHECKED),
    "tp2_dp2_a2a": ServerSpec(
        MODEL, (*BASE, "--attn-dp-size", "2", "--moe-a2a-backend", "glm_a2a")
    ),
    "tp2_dp2_ep2_mtp": ServerSpec(
        DRAFTED, (*BASE, "--attn-dp-size", "2", "--ep-size", "2", *CHAIN_OF_3)
    ),
    "tp2_a2a_mtp": ServerSpec(
        DRAFTED, (*BASE, "--moe-a2a-backend", "glm_a2a", *CHAIN_OF_2), CHECKED
    ),
    "tp2_dcp2": ServerSpec(MODEL, (*BASE, "--dcp-size", "2"), CHECKED),
    "tp2_dcp2_mtp": ServerSpec(DRAFTED, (*BASE, "--dcp-size", "2", *CHAIN_OF_2), CHECKED),
    "tp2_cp2": ServerSpec(
        MODEL,
        (*BASE, "--enable-prefill-cp", "--attn-cp-size", "2", "--cp-strategy", "interleave"),
    ),
    "pp2": ServerSpec(MODEL, (*ONE, "--pp-size", "2"), SHARED_START),
    "pp2_mtp": ServerSpec(
        DRAFTED,
        (*ONE, "--pp-size", "2", *CHAIN_OF_2),
        (*SHARED_START, ("SGLANG_ENABLE_PP_SPEC", "1")),
    ),
    "pp2_tp2": ServerSpec(MODEL, (*BASE, "--pp-size", "2"), (*SHARED_START, *DIVIDED_SCAN)),
    "tp4_dp2_a2a": ServerSpec(
        MODEL, (*ONE, "--tp", "4", "--attn-dp-size", "2", "--moe-a2a-backend", "glm_a2a"), CHECKED
    ),
}
STOPPABLE = ServerSpec(MODEL, (*BASE, "--watchdog-timeout", str(WATCHDOG_S)))
_SLOW = [name for name in TOPOLOGIES if name not in ("tp2", "tp2_dp2_ep2")]


def topologies(*names: str) -> pytest.MarkDecorator:
    """Run a test on these servers, or on all."""
    params = [
        pytest.param(TOPOLOGIES[name], id=name, marks=[pytest.mark.slow] if name in _SLOW else [])
        for name in names or TOPOLOGIES
    ]
    return pytest.mark.parametrize("server", params, indirect=True)


pytestmark = pytest.mark.server
on_dp = topologies(*(name for name in TOPOLOGIES if "dp2" in name))


@topologies()
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 700])
def test_alone(server: Server, length: int) -> None:
    server.flush_cache()
    ids = prompt(server, length, seed=length)
    check(compare(server, server.generate(ids, max_new_tokens=6), ids))


@topologies()
@pytest.mark.parametrize("count", [2, 3, 5])
def test_batches(server: Server, count: int) -> None:
    server.flush_cache()
    prompts = [
        prompt(server, length, seed=count * 1000 + length) for length in (3, 130, 40, 1, 66)[:count]
    ]
    check(compare_all(server, prompts, max_new_tokens=9))


@on_dp
@pytest.mark.parametrize("busy", [0, 1])
def test_one_busy_rank(server: Server, busy: int) -> None:
    server.flush_cache()
    lengths = (5, 90, 33)
    with ThreadPoolExecutor(4) as threads:
        requested = [
            (ids, threads.submit(server.generate, ids, routed_dp_rank=busy, max_new_tokens=16))
            for ids in (prompt(server, length, seed=busy * 100 + length) for length in lengths)
        ]
        time.sleep(0.3)
        long = prompt(server, 900, seed=busy)
        requested.append(
            (long, threads.submit(server.generate, long, routed_dp_rank=1 - busy, max_new_tokens=4))
        )
        answers = [(ids, answer.result()) for ids, answer in requested]
    assert [answer["meta_info"]["dp_rank"] for _, answer in answers] == [busy] * 3 + [1 - busy]
    check(merge_comparisons(compare(server, answer, ids) for ids, answer in answers))


@topologies()
def test_repeatable(server: Server) -> None:
    ids = prompt(server, 150, seed=5)
    others = [prompt(server, length, seed=40 + length) for length in (10, 90)]
    alone = server.generate(ids, max_new_tokens=4)["output_ids"]
    for _ in range(10):
        assert server.generate(ids, max_new_tokens=4)["output_ids"] == alone
        answers = server.generate([others[0], ids, others[1]], max_new_tokens=4)
        assert answers[1]["output_ids"] == alone


@topologies()
def test_prefix_hit(server: Server) -> None:
    server.flush_cache()
    rank = 1 if "--attn-dp-size" in server.spec.args else None
    first = prompt(server, 290, seed=31)
    second = first[:256] + prompt(server, 30, seed=32)
    server.generate(first, routed_dp_rank=rank)
    answer = server.generate(
        second, routed_dp_rank=rank, logprob_start_len=len(second) - 1, max_new_tokens=6
    )
    # Whole pages, which span all ranks of a striped history; drafts look one token ahead.
    page = 64 * (2 if "--dcp-size" in server.spec.args else 1)
    has_drafts = "--speculative-algorithm" in server.spec.args
    assert answer["meta_info"]["cached_tokens"] == 256 - page * has_drafts
    check(compare(server, answer, second))


@topologies(*(name for name in TOPOLOGIES if name.endswith("mtp")))
def test_drafts(server: Server) -> None:
    server.flush_cache()
    steps = int(server.spec.args[server.spec.args.index("--speculative-num-steps") + 1])
    for request, answer in zip(WAVE, together(server, WAVE), strict=True):
        ids, count = list(request.input_ids), request.max_new_tokens
        alone = simulate(server.spec.model, ids, count, steps, share=True)
        assert answer["output_ids"] == alone.token_ids[:count]
        accepted = accept_histogram(answer, steps)
        if "--pp-size" in server.spec.args:
            # SGLang's first round after a prefill carries no drafts yet.
            assert sum(accepted[1:]) > 0
        else:
            assert accepted == alone.histogram(steps)


@topologies("tp2", "tp2_dp2_ep2")
def test_lost_rank(server: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.generate, prompt(server, 20, seed=1), max_new_tokens=4000)
        time.sleep(2)
        assert not running.done()
        server.rank_process(1).kill()
        killed = time.monotonic()
        with pytest.raises(requests.RequestException):
            running.result(timeout=20)
        assert server.process.wait(20) != 0
        assert time.monotonic() - killed < 20
    assert "closed by peer" in server.log or "reset by peer" in server.log


@pytest.mark.slow
@pytest.mark.parametrize("server", [STOPPABLE], indirect=True, ids=["tp2"])
def test_stopped_rank(server: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.generate, prompt(server, 20, seed=1), max_new_tokens=4000)
        time.sleep(2)
        assert not running.done()
        server.rank_process(1).suspend()
        stopped = time.monotonic()
        with pytest.raises(requests.RequestException):
            running.result(timeout=60)
        assert server.process.wait(60) != 0
        # It looks every half timeout and waits five seconds for the log.
        assert time.monotonic() - stopped < 1.5 * WATCHDOG_S + 5 + 10
    assert "Scheduler watchdog timeout" in server.log
