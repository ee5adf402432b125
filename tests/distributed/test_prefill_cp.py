"""Prefill context parallelism: two ranks take the rows of a prefill in turn (T23).

test_logits     prefill and decode of ragged requests, shorter and longer than index_topk and than a
                page, against transformers; `test_topologies.py` has chunks and cached prefixes
test_turns      each row has one rank, and sees there what it sees in the whole batch
"""

from __future__ import annotations

import pytest
import torch

from sglang_glm.attention.metadata import BatchRows, RequestRows, take_turns
from tests.support.checkpoints import checkpoint
from tests.support.parity import check_steps
from tests.support.ranks import run_ranks

MODEL = checkpoint("--mtp", "--index-topk", "16")
LENGTHS, STEPS = (41, 5, 200, 128), 3


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(3, 900, (length,), generator=rng).tolist() for length in LENGTHS]


def program(rank: int) -> list[torch.Tensor]:
    from tests.support.engine import Engine

    engine = Engine(
        MODEL,
        *("--dtype", "float32", "--max-total-tokens", "2048", "--disable-radix-cache"),
        *("--tp", "2", "--enable-prefill-cp", "--attn-cp-size", "2"),
        *("--cp-strategy", "interleave"),
        rank=rank,
    )
    return engine.logits(prompts(), STEPS)


@pytest.fixture(scope="module")
def ranks() -> list[list[torch.Tensor]]:
    return run_ranks(program)


def test_logits(ranks: list[list[torch.Tensor]]) -> None:
    for steps in ranks:
        check_steps(MODEL, prompts(), steps)


@pytest.mark.parametrize("world_size", [2, 3])
def test_turns(world_size: int) -> None:
    whole, first_row = [], 0
    for num_rows, length in ((5, 9), (1, 1), (1, 70), (8, 8)):
        whole.append(
            RequestRows(first_row=first_row, num_rows=num_rows, slots=torch.arange(length))
        )
        first_row += num_rows
    seen = {
        request.first_row + row: (index, end)
        for index, request in enumerate(whole)
        for row, end in enumerate(request.row_lengths().tolist())
    }
    found = {}
    for rank in range(world_size):
        for request in take_turns(BatchRows(requests=tuple(whole)), rank, world_size).requests:
            index = next(i for i, other in enumerate(whole) if other.slots is request.slots)
            for row, end in enumerate(request.row_lengths().tolist()):
                found[(request.first_row + row) * world_size + rank] = (index, end)
    assert found == seen
