"""Prefill and decode in two servers: what one would have said (T27, T28).

test_text                 latents and index keys are handed over: log-probabilities are transformers'
test_batch                several prompts at once, around page edges and index_topk
test_crowd                more than decode can hold: requests leave for main memory and come back
test_drafts               the MTP state is handed over: same text, and as many accepted drafts
test_refused_prefill      a prompt that only prefill cannot hold: an error at both ends, no text
test_router               the same through sglang-router
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests

from sglang_glm.verification.local_server import free_port
from tests.support.disaggregation import BASE, PREFILL_TOKENS, Pair, pair
from tests.support.mtp_checkpoints import aligned
from tests.support.mtp_traffic import accept_histogram, draft_args
from tests.support.parity import check, clean_prompt, compare, prompt
from tests.support.server import ServerPool, ServerSpec
from tests.support.specs import TRUTH_8

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="NIXL moves the cache: pip install '.[disaggregation]'",
    ),
]

STEPS = 3

LENGTHS = [1, 7, 8, 9, 63, 64, 65, 129, 500]
BATCH = [5, 64, 130, 300, 65]
#: Together more than decode's pool holds once they have grown.
CROWD, COPIES = [60, 64, 61], 4
TOO_LONG = PREFILL_TOKENS + 200
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    """Prompts by length; those of `LENGTHS` have no near-tie, which takes the oracle to find out."""
    stopped = SimpleNamespace(spec=ServerSpec(TRUTH_8.model))
    clean = {length: clean_prompt(stopped, length) for length in LENGTHS}
    others = {n: prompt(stopped, n, seed=7) for n in (*BATCH, *CROWD, TOO_LONG)}
    return others | clean


@pytest.fixture(scope="module")
def answers(pool: ServerPool, prompts: dict[int, list[int]]) -> dict[str, list]:
    """Everything that the pair said; on two cores, the oracle runs when both have stopped."""
    pool.close()
    params = {"temperature": 0, "max_new_tokens": 8}
    with pair(TRUTH_8.model) as servers:
        found = {"text": [servers.generate(prompts[n], max_new_tokens=NEW_TOKENS) for n in LENGTHS]}
        found["alone"] = [servers.generate(prompts[n], max_new_tokens=16) for n in BATCH]
        with ThreadPoolExecutor(len(BATCH)) as threads:
            found["batch"] = list(
                threads.map(lambda n: servers.generate(prompts[n], max_new_tokens=16), BATCH)
            )
        grow = functools.partial(servers.generate, max_new_tokens=140)
        found["lone"] = [grow(prompts[n]) for n in CROWD]
        with ThreadPoolExecutor(COPIES * len(CROWD)) as threads:
            found["crowd"] = list(threads.map(grow, [prompts[n] for n in CROWD] * COPIES))
        found["retracted"] = re.findall(r"#retracted_reqs: (\d+)", servers.decode.log)
        servers.wait_idle()
        body = {"input_ids": prompts[TOO_LONG], "sampling_params": params}
        found["refused"] = list(servers.post(body))
        servers.wait_idle()
        found["after"] = [servers.generate(prompts[129], max_new_tokens=NEW_TOKENS)]
        found["router"] = through_router(servers, [prompts[130], prompts[TOO_LONG]])
        servers.wait_idle()
    return found


def through_router(servers: Pair, prompts: list[list[int]]) -> list[requests.Response]:
    """What the pair says through sglang-router; nothing where that is not installed."""
    if importlib.util.find_spec("sglang_router") is None:
        return []
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--prefill", servers.prefill.url, str(servers.bootstrap_port)),
        *("--decode", servers.decode.url, "--host", "127.0.0.1", "--port", str(port)),
        "--disable-retries",
    ]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    answers: list[requests.Response] = []
    try:
        deadline = time.monotonic() + 60
        while len(answers) < len(prompts) and time.monotonic() < deadline:
            body = {"input_ids": prompts[len(answers)], "sampling_params": params}
            with contextlib.suppress(requests.ConnectionError):
                answer = requests.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60)
                # Until it has seen its workers it answers 503.
                if answer.status_code != 503:
                    answers.append(answer)
                    continue
            assert router.poll() is None, f"the router ended with {router.poll()}"
            time.sleep(0.5)
        return answers
    finally:
        router.terminate()
        router.wait(20)


def check_answer(answer: dict, ids: list[int]) -> None:
    stopped = SimpleNamespace(spec=ServerSpec(TRUTH_8.model))
    check(compare(stopped, answer, ids))


@pytest.mark.parametrize("length", LENGTHS)
def test_text(answers: dict[str, list], prompts: dict[int, list[int]], length: int) -> None:
    answer = answers["text"][LENGTHS.index(length)]
    assert len(answer["output_ids"]) == NEW_TOKENS
    check_answer(answer, prompts[length])


def test_batch(answers: dict[str, list]) -> None:
    texts = {name: [a["output_ids"] for a in answers[name]] for name in ("alone", "batch")}
    assert texts["batch"] == texts["alone"]
    assert all(len(text) == 16 for text in texts["batch"])


def test_crowd(answers: dict[str, list]) -> None:
    assert answers["retracted"], "decode had room for all: nothing was tested"
    alone = [answer["output_ids"] for answer in answers["lone"]]
    assert [answer["output_ids"] for answer in answers["crowd"]] == alone * COPIES


def test_refused_prefill(answers: dict[str, list], prompts: dict[int, list[int]]) -> None:
    for answer in answers["refused"]:
        assert answer.status_code >= 400, answer.text
    # Both are as they were, and serve the next one.
    check_answer(answers["after"][0], prompts[129])


def test_router(answers: dict[str, list]) -> None:
    if not answers["router"]:
        pytest.skip("sglang-router is not installed: pip install '.[disaggregation]'")
    served, refused = answers["router"]
    assert served.status_code == 200, served.text
    assert served.json()["output_ids"] == answers["alone"][BATCH.index(130)]["output_ids"]
    assert refused.status_code >= 400, refused.text


def test_drafts(pool: ServerPool) -> None:
    model = aligned(8)
    prompts = [[(7 * i + length) % 900 for i in range(length)] for length in (5, 70, 200)]
    one = pool.get(ServerSpec(model, (*BASE[:4], "--max-total-tokens", "2048", *draft_args(STEPS))))
    expected = [one.generate(ids, max_new_tokens=48) for ids in prompts]
    assert sum(sum(accept_histogram(answer, STEPS)[1:]) for answer in expected) > 0
    pool.close()
    with pair(model, *draft_args(STEPS)) as servers:
        for ids, first in zip(prompts, expected, strict=True):
            answer = servers.generate(ids, max_new_tokens=48)
            assert answer["output_ids"] == first["output_ids"]
            assert accept_histogram(answer, STEPS) == accept_histogram(first, STEPS)
        servers.wait_idle()
