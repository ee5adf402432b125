"""The index scan divided over two gloo ranks.

test_shares             every position once, whole pages, also with fewer pages than ranks
test_whole_selection    any split of any scores, ties, NaN and empty shares selects what one rank selects
test_ranks_agree        two ranks, each scoring its share, return that same selection
test_costs              short histories are scanned whole, long ones divided; the formula by hand
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from glm_kernels.indexer.topk_indices import topk_indices
from glm_kernels.testing.generate import SCORE_KINDS, score_rows

from sglang_glm.parallel.index_scan import (
    Candidates,
    gather_candidates,
    history_share,
    local_candidates,
    merge_candidates,
)
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.index_scan import CPU_SCAN_COSTS, ScanCosts, gpu_scan_costs
from sglang_glm.planning.released import load_config
from tests.support.ranks import run_ranks

TOPK = 24
#: Rows and cached length; row t of n sees the last n - t - 1 positions less.
REQUESTS = ((1, 25), (3, 64), (2, 65), (5, 200), (4, 1000), (130, 129))


def row_ends(num_rows: int, length: int) -> torch.Tensor:
    return torch.arange(length - num_rows + 1, length + 1)


def scores(kind: str, num_rows: int, length: int) -> torch.Tensor:
    logits = score_rows(kind, num_rows, length, seed=length)
    hidden = torch.arange(length) >= row_ends(num_rows, length)[:, None]
    return logits.masked_fill(hidden, float("-inf"))


def share_candidates(logits: torch.Tensor, rank: int, world_size: int) -> Candidates:
    num_rows, length = logits.shape
    share = history_share(length, rank, world_size)
    part = logits[:, share.start : share.stop]
    return local_candidates(part, row_ends(num_rows, length), share.start, TOPK)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, 1000])
def test_shares(length: int, world_size: int) -> None:
    shares = [history_share(length, rank, world_size) for rank in range(world_size)]
    assert [position for share in shares for position in share] == list(range(length))
    assert all(share.start % 64 == 0 or not share for share in shares)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 64 + 63


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_whole_selection(kind: str, world_size: int) -> None:
    for num_rows, length in REQUESTS:
        logits = scores(kind, num_rows, length)
        parts = [share_candidates(logits, rank, world_size) for rank in range(world_size)]
        joined = Candidates(
            scores=torch.cat([part.scores for part in parts], dim=1),
            positions=torch.cat([part.positions for part in parts], dim=1),
        )
        assert torch.equal(merge_candidates(joined, TOPK), topk_indices(logits, TOPK))


def program(rank: int) -> dict:
    found = {}
    for kind in SCORE_KINDS:
        parts = [share_candidates(scores(kind, *request), rank, 2) for request in REQUESTS]
        own = Candidates(
            scores=torch.cat([part.scores for part in parts]),
            positions=torch.cat([part.positions for part in parts]),
        )
        found[kind] = merge_candidates(gather_candidates(own, dist.group.WORLD), TOPK)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(program)


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_ranks_agree(ranks: list[dict], kind: str) -> None:
    alone = torch.cat([topk_indices(scores(kind, *request), TOPK) for request in REQUESTS])
    for found in ranks:
        assert torch.equal(found[kind], alone)


def test_costs() -> None:
    glm = load_config("zai-org/GLM-5.3")
    h200 = gpu_scan_costs(glm, find_gpu("h200"))
    for costs, short, long in (
        (CPU_SCAN_COSTS, [(1, 2100)], [(1, 32768)]),
        (h200, [(1, 32768)], [(6, 131072)] * 8),
    ):
        saved = [
            costs.saved_us(scan, index_topk=glm.index_topk, world_size=2) for scan in (short, long)
        ]
        assert saved[0] < 0 < saved[1]
    # A wide batch of short histories would gather more than it scans.
    assert h200.saved_us([(6, 2100)] * 64, index_topk=glm.index_topk, world_size=2) < 0
    ones = ScanCosts(
        pair_us=1, key_us=2, candidate_us=3, collective_us=7, gather_us=10, byte_us=0.5
    )
    # Half of 2 x 10 pairs and 10 keys, less the start and 8 candidates of 8 bytes, twice looked at.
    assert ones.saved_us([(2, 10)], index_topk=4, world_size=2) == 20 - 10 - 8 * (8 * 0.5 + 2 * 3)
    # 60 pairs and 30 keys, the first rank's 40 and 20 less; 6 rows of 4 slots, half of them received.
    by_request = ones.saved_by_request_us([(2, 10)] * 3, index_topk=4, world_size=2)
    assert by_request == (60 + 60) - (40 + 40) - 7 - 6 * 4 * 4 * 0.5 / 2
