"""Scoring and selection on the GPU.

| test | catches |
| --- | --- |
| scores equal fp64; poisoned pages, wild table entries | a read past a length, a wrong head or page |
| every count of tokens and heads equals fp64 and its own selection | a group, a lane or a warpgroup left out |
| the largest codes, weights of all magnitudes | fp16 products or weights that overflow or vanish |
| the Triton form equals fp64 | a fallback that rots |
| output past the lengths and of idle rows untouched (T06) | stores without a bound |
| row alone equals row in batch; twenty repeats equal (T41) | schedules that change the arithmetic |
| selection equals a stable sort on every hostile kind (T04, T07) | ties, NaN, infinities |
| windows and slots, also beyond one context's width | relative output, page arithmetic |
| fused selection equals scores then sort, also on ties (T29, T41) | thresholds, overflow, repair |
| fused slots through a table with strided rows | page arithmetic of serving |
| fused workspace at 192 rows x 1M (T29) | a matrix that crept back |
| graph replay with new data (T20) | values frozen at capture |
"""

import pytest
import torch
from glm_kernels.indexer import paged_mqa_topk_sm90
from glm_kernels.indexer.paged_mqa_logits import paged_mqa_logits
from glm_kernels.indexer.paged_mqa_topk import paged_mqa_topk
from glm_kernels.indexer.paged_mqa_topk_sm90 import MATRIX_BYTES, workspace_bytes
from glm_kernels.indexer.topk_indices import positions_to_slots, topk_indices
from glm_kernels.indexer.topk_indices_torch import topk_indices_torch
from glm_kernels.testing.fp64 import paged_logits_fp64
from glm_kernels.testing.generate import SCORE_KINDS, PagedIndexer, paged_indexer, score_rows
from glm_kernels.testing.numeric import assert_bitwise, assert_logits
from glm_kernels.testing.poison import poison_unused_pages
from glm_kernels.testing.shapes import (
    CORNER_INDEXER,
    CORNER_TOPK,
    MODEL_INDEXER,
    IndexerShape,
    TopkShape,
)

pytestmark = pytest.mark.gpu
SHAPES = [*CORNER_INDEXER, *MODEL_INDEXER]


def arguments(p: PagedIndexer) -> tuple[torch.Tensor, ...]:
    return p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table


def poisoned(shape: IndexerShape, seed: int = 0) -> PagedIndexer:
    p = paged_indexer(shape, seed, "cuda")
    p.index_cache.copy_(poison_unused_pages(p.index_cache, p.cache_seqlens, p.block_table))
    return p


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_scores_equal_fp64(shape: IndexerShape) -> None:
    p = poisoned(shape)
    got = paged_mqa_logits(*arguments(p), p.max_context)
    # The matrix unit keeps fewer than 24 bits of an e4m3 sum.
    assert_logits(got, paged_logits_fp64(p), f"paged_mqa_logits {shape.name}", 5e-6)


@pytest.mark.parametrize("num_heads", [16, 32, 64])
@pytest.mark.parametrize("next_n", range(1, 9))
def test_every_size(next_n: int, num_heads: int) -> None:
    # The last of these requests share blocks, the first fills many.
    lengths = (40_000, 9000, 0, 64, 65, 1000)
    shape = IndexerShape(name="size", lengths=lengths, next_n=next_n, num_heads=num_heads)
    p = poisoned(shape, seed=next_n)
    got = paged_mqa_logits(*arguments(p), p.max_context)
    assert_logits(got, paged_logits_fp64(p), f"next_n {next_n}, {num_heads} heads", 5e-6)
    selected = paged_mqa_topk_sm90.select_in_one_pass(*arguments(p), 2048, False)
    assert_bitwise(selected, topk_indices_torch(got.cpu(), 2048), f"next_n {next_n}")


def test_largest_codes() -> None:
    p = poisoned(IndexerShape(name="codes", lengths=(700,), next_n=6))
    # 448 and -448: a product is 128 * 448 * 448, one way or the other.
    p.q.view(torch.uint8).fill_(0x7E)
    signs = torch.where(torch.arange(8192, device="cuda") % 1280 < 640, 0x7E, 0xFE)
    p.index_cache[p.block_table[0].long(), :8192] = signs.to(torch.uint8)
    got = paged_mqa_logits(*arguments(p), p.max_context)
    assert_logits(got, paged_logits_fp64(p), "codes of 448", 5e-6)


def test_weights_of_all_magnitudes() -> None:
    p = poisoned(IndexerShape(name="weights", lengths=(3000, 700), next_n=6))
    for token, exponent in enumerate((-30, -20, -3, 0, 12, 25)):
        p.weights[0, token] *= 10.0**exponent
    p.weights[1, 0] = 0.0
    p.weights[1, 1, 3] = 1e6  # beside it the others count little, but must not disturb
    p.weights[1, 2, 1:] = 0.0
    got, want = paged_mqa_logits(*arguments(p), p.max_context), paged_logits_fp64(p)
    for row in range(12):
        assert_logits(got[row : row + 1], want[row : row + 1], f"row {row}", 5e-6)
    assert (got[6, :695] == 0).all()


@pytest.mark.parametrize("shape", CORNER_INDEXER[:4], ids=lambda s: s.name)
def test_triton_form_equals_fp64(shape: IndexerShape) -> None:
    from glm_kernels.indexer.paged_mqa_logits_triton import paged_mqa_logits_triton

    p = poisoned(shape)
    rows = len(shape.lengths) * shape.next_n
    got = torch.full((rows, p.max_context), float("-inf"), device="cuda")
    paged_mqa_logits_triton(*arguments(p), got)
    assert_logits(got, paged_logits_fp64(p), f"triton {shape.name}", 5e-6)


def test_nothing_past_the_lengths_is_written() -> None:
    from glm_kernels.indexer.paged_mqa_logits_sm90 import paged_mqa_logits_sm90

    shape = CORNER_INDEXER[0]
    p = poisoned(shape)
    out = torch.full((len(shape.lengths), p.max_context), 123.0, device="cuda")
    paged_mqa_logits_sm90(*arguments(p), out)
    for row, length in enumerate(shape.lengths):
        assert (out[row, max(length, 0) :] == 123.0).all(), f"length {length}"
        assert (out[row, : max(length, 0)] != 123.0).all(), f"length {length}"


@pytest.mark.parametrize("shape", [CORNER_INDEXER[1], MODEL_INDEXER[2]], ids=lambda s: s.name)
def test_rows_do_not_depend_on_their_batch(shape: IndexerShape) -> None:
    p = poisoned(shape)
    want = paged_mqa_logits(*arguments(p), p.max_context)
    for _ in range(20):
        assert_bitwise(paged_mqa_logits(*arguments(p), p.max_context), want, "repeat")
    n = shape.next_n
    for request in range(len(shape.lengths)):
        one = slice(request, request + 1)
        alone = paged_mqa_logits(
            p.q[one],
            p.index_cache,
            p.weights[one],
            p.cache_seqlens[one],
            p.block_table[one],
            p.max_context,
        )
        assert_bitwise(alone, want[request * n : (request + 1) * n], f"request {request} alone")


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("shape", CORNER_TOPK, ids=lambda s: s.name)
def test_selection_equals_stable_sort(shape: TopkShape, kind: str) -> None:
    logits = score_rows(kind, shape.num_tokens, shape.width, 0, "cuda")
    got = topk_indices(logits, shape.topk)
    want = topk_indices_torch(logits.cpu(), shape.topk)
    assert_bitwise(got, want, f"topk {shape.name} {kind}")
    for _ in range(20):
        assert_bitwise(topk_indices(logits, shape.topk), got, "repeat")


@pytest.mark.parametrize("kind", ["normal", "relu", "special"])
def test_windows_and_slots(kind: str) -> None:
    width = 40_000
    logits = score_rows(kind, 8, width, 3, "cuda")
    start = torch.tensor([0, 5, 50, 60, 0, 39_999, 70, 20_000], dtype=torch.int32, device="cuda")
    end = torch.tensor(
        [width, 30, 50, 40, 0, width, 15_000, width], dtype=torch.int32, device="cuda"
    )
    got = topk_indices(logits, 2048, start, end)
    want = topk_indices_torch(logits.cpu(), 2048, start.cpu(), end.cpu())
    assert_bitwise(got, want, f"windows {kind}")
    table = torch.randperm(4 * 625, device="cuda").view(4, 625).int()
    slots = topk_indices(logits, 2048, start, end, table)
    position = want.clamp_min(0).long()
    owner = torch.arange(8)[:, None] // 2
    expected = table.cpu()[owner, position // 64] * 64 + position % 64
    assert_bitwise(slots, expected.masked_fill(want < 0, -1).int(), f"slots {kind}")


def test_windows_of_a_wide_matrix() -> None:
    # A prefill batch lays the keys of its requests side by side: together more than one context.
    width = 3 << 20
    logits = score_rows("normal", 3, width, 4, "cuda")
    start = torch.tensor([0, 2_000_000, 1_500_000], dtype=torch.int32, device="cuda")
    end = torch.tensor([1_200_000, width, 1_500_500], dtype=torch.int32, device="cuda")
    got = topk_indices(logits, 2048, start, end)
    want = topk_indices_torch(logits.cpu(), 2048, start.cpu(), end.cpu())
    assert_bitwise(got, want, "wide")


@pytest.fixture(params=[0, MATRIX_BYTES], ids=["one_pass", "matrix"])
def matrix_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_mqa_topk_sm90, "MATRIX_BYTES", request.param)


@pytest.mark.usefixtures("matrix_bytes")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_fused_equals_two_steps(shape: IndexerShape) -> None:
    p = poisoned(shape, seed=1)
    logits = paged_mqa_logits(*arguments(p), p.max_context)
    want = topk_indices_torch(logits.cpu(), shape.topk)
    for _ in range(3):
        assert_bitwise(paged_mqa_topk(*arguments(p), shape.topk), want, f"fused {shape.name}")


@pytest.mark.usefixtures("matrix_bytes")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_fused_slots_of_a_repeated_table(shape: IndexerShape) -> None:
    p = poisoned(shape, seed=2)
    q, cache, weights, lengths, table = arguments(p)
    # Serving repeats a request's table for each of its rows; the kernels step over the copies.
    repeated = table.repeat_interleave(3, 0).view(table.shape[0], 3, table.shape[1])[:, 0]
    want = paged_mqa_topk(*arguments(p), shape.topk)
    got = paged_mqa_topk(q, cache, weights, lengths, repeated, shape.topk, return_slots=True)
    assert_bitwise(got, positions_to_slots(want, table, 64), f"slots {shape.name}")


@pytest.mark.usefixtures("matrix_bytes")
@pytest.mark.parametrize("kind", ["zero", "sorted", "two_values"])
def test_fused_repairs_what_a_threshold_cannot_divide(kind: str) -> None:
    shape = IndexerShape(name=kind, lengths=(20_000, 9000, 300), next_n=3)
    p = poisoned(shape)
    weights = p.weights.abs()
    if kind == "zero":
        weights[0] = 0.0  # 20,000 tied scores
    elif kind == "two_values":
        p.index_cache[:, :8192] = 0x38  # every key the same; its scale has few values
    else:
        # Scores that fall along the context, constant within a page: the sample is far from random.
        p.index_cache[:, :8192] = 0x38
        scale = 1 + torch.arange(p.max_context // 64, device="cuda").flip(0) * 1e-3
        for request, length in enumerate(shape.lengths):
            blocks = (length + 63) // 64
            pages = p.block_table[request, :blocks].long()
            p.index_cache[:, 8192:].view(torch.float32)[pages] = scale[:blocks, None]
    args = (p.q, p.index_cache, weights, p.cache_seqlens, p.block_table)
    want = topk_indices_torch(paged_mqa_logits(*args, p.max_context).cpu(), 2048)
    for _ in range(5):
        assert_bitwise(paged_mqa_topk(*args, 2048), want, f"fused {kind}")


def test_fused_workspace() -> None:
    assert workspace_bytes(192, (1 << 20) // 64) <= 64 << 20
    shape = IndexerShape(name="ws", lengths=(1 << 20,) * 6, next_n=6)
    p = paged_indexer(shape, 0, "cuda")
    paged_mqa_topk(*arguments(p), 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    paged_mqa_topk(*arguments(p), 2048)
    used = torch.cuda.max_memory_allocated() - before
    # The allocator rounds each of five blocks up, large ones by less than half a MiB.
    assert used <= workspace_bytes(36, (1 << 20) // 64) + 36 * 2048 * 4 + (5 << 19)


def test_graph_replay_with_new_data() -> None:
    shape = MODEL_INDEXER[2]
    p, other = poisoned(shape, 0), poisoned(shape, 5)
    paged_mqa_topk(*arguments(p), 2048)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_mqa_topk(*arguments(p), 2048)
    for target, source in zip(arguments(p), arguments(other), strict=True):
        target.copy_(source)
    p.cache_seqlens[1] = 0
    p.cache_seqlens[3] = 40
    graph.replay()
    want = topk_indices_torch(paged_mqa_logits(*arguments(p), p.max_context).cpu(), 2048)
    assert_bitwise(got, want, "replay")
