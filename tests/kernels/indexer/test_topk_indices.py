"""Exact selection.

| test | catches |
| --- | --- |
| equals stable sort on every hostile kind (T04, T07) | ties taken at random, NaN on top, -inf selected |
| windows and their relative output (T06, T07) | absolute indices, inverted windows, masked head of a row |
| slots | page arithmetic, -1 turned into a slot |
| row alone equals row in batch, repeats equal (T41) | a result that depends on its neighbours |
| score and select equals the two steps, in pieces (T29) | a piece that loses its window |
| properties, any input (hypothesis) | whatever the listed kinds miss |
| k = 0, empty rows, refusals | launches over nothing |
"""

import pytest
import torch
from glm_kernels.indexer.mqa_logits import mqa_logits
from glm_kernels.indexer.mqa_topk import mqa_topk
from glm_kernels.indexer.paged_mqa_logits import paged_mqa_logits
from glm_kernels.indexer.paged_mqa_topk import paged_mqa_topk
from glm_kernels.indexer.topk_indices import positions_to_slots, topk_indices
from glm_kernels.indexer.topk_indices_ref import topk_indices_ref
from glm_kernels.testing.generate import SCORE_KINDS, generator, paged_indexer, score_rows
from glm_kernels.testing.numeric import assert_bitwise
from glm_kernels.testing.poison import poison_unused_pages
from glm_kernels.testing.shapes import TINY_INDEXER, TINY_TOPK, IndexerShape, TopkShape
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("shape", TINY_TOPK, ids=lambda s: s.name)
def test_equals_stable_sort(shape: TopkShape, kind: str) -> None:
    logits = score_rows(kind, shape.num_tokens, shape.width)
    got = topk_indices(logits, shape.topk)
    assert_bitwise(got, topk_indices_ref(logits, shape.topk), f"topk {shape.name} {kind}")


def test_tie_plateau() -> None:
    logits = score_rows("plateau", 3, 8320)
    got = topk_indices(logits, 2048)
    assert (got >= 0).all()
    for row, chosen in zip(logits, got.long(), strict=True):
        assert chosen.unique().numel() == 2048
        assert torch.equal(row[chosen].sort().values, row.topk(2048).values.sort().values)
        zeros = chosen[100:]
        assert torch.equal(zeros, (row == 0).nonzero()[:1948, 0])


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("width", [90, 900])
def test_windows(kind: str, width: int) -> None:
    logits = score_rows(kind, 7, width, seed=1)
    start = torch.tensor([0, 5, 50, 60, 0, 89, 70], dtype=torch.int32)
    end = torch.tensor([width, 30, 50, 40, 0, 90, width], dtype=torch.int32)
    got = topk_indices(logits, 24, start, end)
    assert_bitwise(got, topk_indices_ref(logits, 24, start, end), f"windows {kind}")


def test_masked_head_then_valid_entries() -> None:
    logits = torch.full((1, 1500), float("-inf"))
    logits[0, 1400:] = torch.arange(100.0)
    got = topk_indices(logits, 128)
    assert got[0, :100].tolist() == list(range(1499, 1399, -1))
    assert (got[0, 100:] == -1).all()


def test_slots() -> None:
    logits = score_rows("special", 6, 300)
    table = torch.randperm(15, generator=generator(0)).view(3, 5).int()
    positions = topk_indices(logits, 90)
    got = topk_indices(logits, 90, block_table=table, page_size=64)
    for row in range(6):
        want = [
            -1 if p < 0 else int(table[row // 2, p // 64]) * 64 + p % 64
            for p in positions[row].tolist()
        ]
        assert got[row].tolist() == want
    owner = torch.tensor([2, 0, 1, 1, 0, 2])
    by_row = topk_indices(logits, 90, block_table=table, row_to_batch=owner)
    flat = positions_to_slots(
        positions, (table[..., None] * 64 + torch.arange(64)).flatten(1), 1, owner
    )
    assert_bitwise(by_row, flat.int(), "row_to_batch and page size 1")


@pytest.mark.parametrize("kind", ["relu", "bf16", "near_ties"])
def test_row_alone_and_repeats(kind: str) -> None:
    logits = score_rows(kind, 5, 3000)
    want = topk_indices(logits, 200)
    for _ in range(20):
        assert_bitwise(topk_indices(logits, 200), want, "repeat")
    for row in range(5):
        alone = topk_indices(logits[row : row + 1], 200)
        assert_bitwise(alone, want[row : row + 1], f"row {row} alone")


@pytest.mark.parametrize("shape", TINY_INDEXER, ids=lambda s: s.name)
def test_paged_score_and_select(shape: IndexerShape) -> None:
    p = paged_indexer(shape)
    pages = poison_unused_pages(p.index_cache, p.cache_seqlens, p.block_table)
    args = (p.q, pages, p.weights, p.cache_seqlens, p.block_table)
    got = paged_mqa_topk(*args, shape.topk)
    want = topk_indices_ref(paged_mqa_logits(*args, p.max_context), shape.topk)
    assert_bitwise(got, want, f"paged_mqa_topk {shape.name}")
    slots = paged_mqa_topk(*args, shape.topk, return_slots=True)
    assert_bitwise(slots, positions_to_slots(want, p.block_table, 64), f"slots {shape.name}")


def test_ragged_score_and_select_in_pieces() -> None:
    rng = generator(0)
    q, k = torch.randn(9, 2, 128, generator=rng), torch.randn(40, 128, generator=rng)
    weights = torch.randn(9, 2, generator=rng)
    start = torch.tensor([0, 0, 3, 9, 20, 39, 12, 5, 0])
    end = torch.tensor([1, 40, 9, 9, 30, 40, 2, 25, 0])
    want = topk_indices(mqa_logits(q, k, weights, start, end), 8, start, end)
    for logits_bytes in (1, 500, 1 << 20):
        got = mqa_topk(q, k, weights, start, end, 8, logits_bytes=logits_bytes)
        assert_bitwise(got, want, f"mqa_topk {logits_bytes}")


scores = st.sampled_from(
    [0.0, -0.0, 1.0, 1.0000001, -3.5, float("inf"), float("-inf"), float("nan")]
)


@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(scores, min_size=1, max_size=40), k=st.integers(0, 45), repeat=st.integers(1, 30)
)
def test_any_row(row: list[float], k: int, repeat: int) -> None:
    logits = torch.tensor([row * repeat])
    assert_bitwise(topk_indices(logits, k), topk_indices_ref(logits, k), f"{row} x {repeat}, k {k}")


def test_nothing_to_do_and_refusals() -> None:
    assert topk_indices(torch.zeros(0, 5), 3).shape == (0, 3)
    assert topk_indices(torch.zeros(2, 0), 3).tolist() == [[-1] * 3] * 2
    with pytest.raises(ValueError, match="k is -1"):
        topk_indices(torch.zeros(2, 5), -1)
    with pytest.raises(ValueError, match="5 rows do not divide over 2 requests"):
        topk_indices(torch.zeros(5, 8), 2, block_table=torch.zeros(2, 1, dtype=torch.int32))
