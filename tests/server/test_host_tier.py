"""The host tier: what was evicted and comes back is what was there (T08, T12, T33).

test_reload             prompts evicted and read again: log-probabilities are transformers', as on a cold run
test_reload_at_edges    reloaded prefixes at page edges -1/0/+1 and around index_topk
test_reload_drafts      the draft's state comes back too: same text, and as many accepted drafts
test_longer_than_the_pool   a prompt that the device cannot hold is an error, whatever the host could hold
test_reload_forms       FP8 rows and pages, either layout of the host's pages
"""

from __future__ import annotations

import pytest

from tests.support.mtp_checkpoints import aligned
from tests.support.mtp_traffic import accept_histogram, draft_args
from tests.support.parity import check, clean_prompt, compare, prompt
from tests.support.server import Server, ServerSpec
from tests.support.specs import TRUTH_8

pytestmark = [pytest.mark.server, pytest.mark.slow]

#: A device pool of twelve pages, a host tier of 48.
POOL_TOKENS = 768
TIER = (
    *("--chunked-prefill-size", "128", "--max-total-tokens", str(POOL_TOKENS)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--enable-cache-report"),
)
#: SGLang counts its pages whenever it is idle, and here after every step too.
CHECKS = (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),)
TRUTH = ServerSpec(TRUTH_8.model, ("--dtype", "float32", *TIER), CHECKS)
LAYER_FIRST = ServerSpec(
    TRUTH_8.model, (*TRUTH.args, "--hicache-mem-layout", "layer_first"), CHECKS
)
FP8 = ServerSpec(
    TRUTH_8.model, ("--dtype", "float32", "--kv-cache-dtype", "fp8_e4m3", *TIER), CHECKS
)
STEPS = 5
DRAFTS = ServerSpec(aligned(8), ("--dtype", "float32", *TIER, *draft_args(STEPS)), CHECKS)

SERVER = TRUTH


def overwrite_device_pool(server: Server) -> None:
    """Run requests that need every page of the device, so that all else is on the host only."""
    for seed in range(3):
        answer = server.generate(
            prompt(server, POOL_TOKENS - 160, seed=900 + seed),
            max_new_tokens=1,
            logprob_start_len=-1,
        )
        assert len(answer["output_ids"]) == 1


def from_host(answer: dict) -> int:
    """Tokens of the prompt that were read from the host tier."""
    details = answer["meta_info"]["cached_tokens_details"]
    return details["host"] if details else 0


def reload(server: Server, ids: list[int], shared: int, **sampling: object) -> dict:
    """Evict everything, then answer `ids`, whose first `shared` tokens were seen before."""
    overwrite_device_pool(server)
    answer = server.generate(ids, logprob_start_len=shared + 1, **sampling)
    assert from_host(answer) == shared // 64 * 64, answer["meta_info"]
    return answer


def test_reload(server: Server) -> None:
    server.flush_cache()
    prompts = [clean_prompt(server, length) for length in (100, 200, 330)]
    cold = [server.generate(ids, max_new_tokens=24) for ids in prompts]
    for ids, first in zip(prompts, cold, strict=True):
        again = reload(server, ids, len(ids) - 1, max_new_tokens=24)
        assert again["output_ids"] == first["output_ids"]
        check(compare(server, again, ids))
    server.wait_idle()


@pytest.mark.parametrize("shared", [63, 64, 65, 127, 128, 129, 320])
def test_reload_at_edges(server: Server, shared: int) -> None:
    server.flush_cache()
    first = prompt(server, shared + 40, seed=31)
    second = first[:shared] + prompt(server, 50, seed=32)
    server.generate(first)
    answer = reload(server, second, shared, max_new_tokens=16)
    check(compare(server, answer, second))
    server.wait_idle()


def test_longer_than_the_pool(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 4}
    for length in (POOL_TOKENS, POOL_TOKENS + 1, 3 * POOL_TOKENS):
        answer = server.post(
            "/generate", input_ids=prompt(server, length, seed=length), sampling_params=params
        )
        assert answer.status_code == 400, answer.text
        assert f"Input length ({length} tokens) exceeds" in answer.text
    server.wait_idle()


@pytest.mark.parametrize("server", [LAYER_FIRST, FP8], ids=["layer_first", "fp8"], indirect=True)
def test_reload_forms(server: Server) -> None:
    server.flush_cache()
    prompts = [prompt(server, length, seed=length) for length in (130, 300)]
    cold = [server.generate(ids, max_new_tokens=24) for ids in prompts]
    for ids, first in zip(prompts, cold, strict=True):
        assert (
            reload(server, ids, len(ids) - 1, max_new_tokens=24)["output_ids"]
            == first["output_ids"]
        )
    server.wait_idle()


@pytest.mark.parametrize("server", [DRAFTS], ids=["drafts"], indirect=True)
def test_reload_drafts(server: Server) -> None:
    server.flush_cache()
    prompts = [prompt(server, length, seed=length) for length in (70, 200, 330)]
    cold = [server.generate(ids, max_new_tokens=48) for ids in prompts]
    assert sum(sum(accept_histogram(answer, STEPS)[1:]) for answer in cold) > 0
    for ids, first in zip(prompts, cold, strict=True):
        again = reload(server, ids, len(ids) - 1, max_new_tokens=48)
        assert again["output_ids"] == first["output_ids"]
        assert accept_histogram(again, STEPS) == accept_histogram(first, STEPS)
    server.wait_idle()
