"""Two ranks share one cache page by page and prefill as one process does (T08).

test_logits             ragged requests in two chunks, the second of which gathers the first, against
                        transformers; all rows on every rank, and rows in turn (slow)
test_half               each rank allocates half of what one would, and stores its pages' rows alone;
                        together they store every position once
test_decode             a rank that has half of the history refuses to decode
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.parity import check_steps
from tests.support.ranks import run_ranks

MODEL = checkpoint("--mtp", "--index-topk", "16")
CUT, LENGTHS, TOKENS = 128, (129, 200, 300), 512

IN_TURN = ("--enable-prefill-cp", "--attn-cp-size", "2", "--cp-strategy", "interleave")


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(3, 900, (length,), generator=rng).tolist() for length in LENGTHS]


def program(flags: tuple[str, ...], rank: int) -> dict:
    from tests.support.engine import Engine

    engine = Engine(
        MODEL,
        *("--dtype", "float32", "--max-total-tokens", str(TOKENS), "--disable-radix-cache"),
        *("--chunked-prefill-size", "1024", "--context-length", "1024"),
        *("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"),
        *("--tp", "2", "--enable-kv-cache-sharding", *flags),
        rank=rank,
    )
    logits = engine.chunked_logits(prompts(), CUT)
    pool = engine.runner.token_to_kv_pool
    found = {
        "logits": logits,
        "bytes": pool.get_kv_size_bytes(),
        "latent_rows": pool.kv_buffer[0].shape[0],
        "written_rows": int(pool.kv_buffer[0].abs().sum((1, 2)).ne(0).sum()),
        "written_keys": int(pool.index_key_cache.buffer[0].view(-1, 128).abs().sum(1).ne(0).sum()),
        "layers": [int(buffer.shape[0] > 0) for buffer in pool.index_key_cache.buffer],
    }
    pool.end_shard_extend()
    try:
        pool.latent_cache(0)
    except RuntimeError as error:
        found["decode"] = str(error)
    return found


@pytest.fixture(
    scope="module", params=[(), pytest.param(IN_TURN, marks=pytest.mark.slow)], ids=["tp", "cp"]
)
def ranks(request: pytest.FixtureRequest) -> list[dict]:
    return run_ranks(partial(program, request.param))


def test_logits(ranks: list[dict]) -> None:
    for rank in ranks:
        check_steps(MODEL, prompts(), [rank["logits"]])


def test_half(ranks: list[dict]) -> None:
    for rank in ranks:
        slots = TOKENS + 64
        assert rank["latent_rows"] == slots
        full_layers = sum(rank["layers"])
        assert 0 < full_layers < len(rank["layers"])
        assert rank["bytes"] == slots * 4 * (len(rank["layers"]) * 576 + full_layers * 128)
        assert rank["written_rows"] == rank["written_keys"]
    # More than one rank could hold, and every position once.
    assert sum(LENGTHS) > TOKENS
    assert sum(rank["written_rows"] for rank in ranks) == sum(LENGTHS)
    assert abs(ranks[0]["written_rows"] - ranks[1]["written_rows"]) <= 64 * len(LENGTHS)


def test_decode(ranks: list[dict]) -> None:
    for rank in ranks:
        assert "decode on a server without --enable-kv-cache-sharding" in rank["decode"]
