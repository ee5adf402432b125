"""Decode context parallelism: two ranks hold one history in stripes and answer as one process (T24).

test_logits         prefill and decode of ragged requests, shorter and longer than index_topk and than
                    a page, against transformers
test_ranks_agree    both ranks return the same bits
test_stripes        each rank stores every other slot's latents, in half the rows, and all index keys
"""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.parity import check_steps
from tests.support.ranks import run_ranks

MODEL = checkpoint("--mtp", "--index-topk", "16")
LENGTHS, STEPS, TOKENS = (40, 5, 200, 128), 4, 1024


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(3, 900, (length,), generator=rng).tolist() for length in LENGTHS]


def program(rank: int) -> dict:
    from tests.support.engine import Engine

    engine = Engine(
        MODEL,
        *("--dtype", "float32", "--max-total-tokens", str(TOKENS), "--disable-radix-cache"),
        *("--tp", "2", "--dcp-size", "2"),
        rank=rank,
    )
    logits = engine.logits(prompts(), STEPS)
    pool = engine.runner.token_to_kv_pool
    return {
        "logits": logits,
        "latent_rows": pool.kv_buffer[0].shape[0],
        "written_rows": int(pool.kv_buffer[0].abs().sum((1, 2)).ne(0).sum()),
        "index_keys": pool.index_key_cache.keys(0).shape[0],
        "written_keys": int(pool.index_key_cache.keys(0).abs().sum(1).ne(0).sum()),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(program)


def test_logits(ranks: list[dict]) -> None:
    check_steps(MODEL, prompts(), ranks[0]["logits"])


def test_ranks_agree(ranks: list[dict]) -> None:
    for own, other in zip(ranks[0]["logits"], ranks[1]["logits"], strict=True):
        assert torch.equal(own, other)


def test_stripes(ranks: list[dict]) -> None:
    # Every position of a prefill and of the steps that a decode feeds back.
    positions = sum(LENGTHS) + STEPS * len(LENGTHS)
    for rank in ranks:
        assert rank["latent_rows"] == TOKENS + 64
        assert rank["index_keys"] == 2 * (TOKENS + 64)
        assert rank["written_keys"] == positions
    assert sum(rank["written_rows"] for rank in ranks) == positions
    assert abs(ranks[0]["written_rows"] - ranks[1]["written_rows"]) <= len(LENGTHS)
