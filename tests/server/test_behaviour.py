"""The trained tiny checkpoint through a real server: it retrieves, drafts and talks.

One server of the ordinary suite, with everything a deployment turns on: BF16, drafts, chunked
prefill, the prefix cache. The slow tests change one thing at a time and run the whole evaluation.
"""

from __future__ import annotations

import pytest

from sglang_glm.verification.behaviour import run_behaviour
from sglang_glm.verification.behaviour.client import Client
from sglang_glm.verification.behaviour.run import BehaviourReport, behaviour_options
from sglang_glm.verification.behaviour.talk import (
    measure_drafts,
    write_conversations,
)
from tests.support.mtp_traffic import draft_args
from tests.support.server import Server, ServerPool, ServerSpec
from tests.support.tiny import (
    CHECKPOINT,
    needs_checkpoint,
    with_dropped_index_keys,
    with_half_split_index_rope,
    with_two_index_rope_layouts,
)

pytestmark = [pytest.mark.server, needs_checkpoint]

POOL_TOKENS = 12_288
BASE = ("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "1024")
SERVER = ServerSpec(str(CHECKPOINT), (*BASE, *draft_args(5)))
PLAIN = ServerSpec(str(CHECKPOINT), BASE)
FP8 = ServerSpec(str(CHECKPOINT), (*SERVER.args, "--kv-cache-dtype", "fp8_e4m3"))
HOST_TIER = ServerSpec(
    str(CHECKPOINT), (*SERVER.args, "--enable-hierarchical-cache", "--hicache-ratio", "2")
)

CORE = {
    "lengths": [2048],
    "contexts": 1,
    "questions": 24,
    "crowded": 0,
    "conversations": 8,
    "min_retrieval": 0.95,
}


def evaluate(server: Server, **changes: object) -> BehaviourReport:
    report = run_behaviour(server.url, behaviour_options(**changes))
    print(report.render())
    return report


def test_core(server: Server) -> None:
    report = evaluate(server, **CORE)
    assert report.passed, report.render()
    assert report.retrieval.cached_share > 0.8
    assert report.hit.cached_tokens > 0
    assert report.cold.right_replies > 0.7


def evict(client: Client) -> None:
    """Send prompts that need every page of the device."""
    for number in range(POOL_TOKENS // 1500 + 1):
        client.generate([[7 + number] * 1500], 1)


def test_drafts_after_eviction(server: Server) -> None:
    """The prompts' pages are gone and come anew."""
    client = Client(server.url)
    conversations = write_conversations(8, 5)
    cold = measure_drafts(client, conversations)
    evict(client)
    again = measure_drafts(client, conversations)
    assert again.cached_tokens == 0
    assert again.accept_length >= 0.95 * cold.accept_length


@pytest.mark.slow
def test_drafts_after_reload(pool: ServerPool) -> None:
    """The prompts' pages come back from the host."""
    client = Client(pool.get(HOST_TIER).url)
    conversations = write_conversations(8, 5)
    cold = measure_drafts(client, conversations)
    evict(client)
    again = measure_drafts(client, conversations)
    assert again.cached_tokens > 0
    assert again.accept_length >= 0.95 * cold.accept_length
    assert again.right_replies == cold.right_replies


@pytest.mark.slow
def test_every_cache_and_drafts_on_and_off(pool: ServerPool) -> None:
    reports = {
        name: evaluate(pool.get(spec))
        for name, spec in (("drafts", SERVER), ("plain", PLAIN), ("fp8", FP8))
    }
    for name, report in reports.items():
        assert report.passed, f"{name}: {report.render()}"
        assert report.retrieval.total.asked >= 300
    shares = {name: report.retrieval.total.share for name, report in reports.items()}
    assert abs(shares["fp8"] - shares["drafts"]) <= 0.01
    assert not reports["plain"].cold.rounds
    # Drafts change no reply.
    replies = {name: report.cold.right_replies for name, report in reports.items()}
    assert replies["plain"] == pytest.approx(replies["drafts"], abs=0.05)


@pytest.mark.slow
def test_faults_of_the_index_are_seen(pool: ServerPool) -> None:
    options = dict(CORE, questions=40, crowded=1)
    right = evaluate(pool.get(PLAIN), **options).retrieval
    assert right.total.share >= 0.95
    for mutant in (with_dropped_index_keys(), with_two_index_rope_layouts()):
        wrong = evaluate(pool.get(ServerSpec(mutant, BASE)), **options).retrieval
        assert wrong.total.share < 0.5
    mutant = with_half_split_index_rope()
    wrong = evaluate(pool.get(ServerSpec(mutant, BASE)), **options).retrieval
    assert wrong.positional.share <= right.positional.share - 0.3
