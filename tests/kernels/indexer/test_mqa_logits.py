"""Ragged and paged index scores.

| test | catches |
| --- | --- |
| ragged equals fp64 loop (fp32, bf16, e4m3) | head weights after the sum, missing ReLU, scale misuse |
| windows: empty, inverted, whole (T06) | a half-open bound off by one |
| block seams | a block product that drops its remainder |
| paged equals fp64 loop, poisoned pages, hostile table | reading past a length, through -1 or a wild page |
| paged equals ragged on gathered keys | two definitions that drift apart |
| paged over float keys | the truth mode |
| permuting keys permutes scores | position leaking into the score |
| idle rows (T06, T07) | negative lengths read as unsigned |
| refusals | e4m3 without scales; a narrow table |
"""

import pytest
import torch
from glm_kernels.cache.index_pages import load_index_k, quantize_index_k
from glm_kernels.indexer import mqa_logits_torch
from glm_kernels.indexer.mqa_logits import mqa_logits
from glm_kernels.indexer.mqa_logits_ref import mqa_logits_ref
from glm_kernels.indexer.paged_mqa_logits import paged_mqa_logits
from glm_kernels.indexer.paged_mqa_logits_ref import paged_mqa_logits_ref
from glm_kernels.testing.generate import generator, paged_indexer
from glm_kernels.testing.numeric import assert_bitwise, assert_logits
from glm_kernels.testing.poison import poison_unused_pages
from glm_kernels.testing.shapes import TINY_INDEXER, IndexerShape

KS = torch.tensor([0, 3, 10, 40, 0, 25], dtype=torch.int32)
KE = torch.tensor([50, 4, 10, 20, 0, 50], dtype=torch.int32)


def ragged(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rng = generator(5)
    q = torch.randn(6, 4, 128, generator=rng)
    k = torch.randn(50, 128, generator=rng)
    return q.to(dtype), k.to(dtype), torch.randn(6, 4, generator=rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_equals_loop(dtype: torch.dtype) -> None:
    args = (*ragged(dtype), KS, KE)
    got = mqa_logits(*args)
    assert_logits(got, mqa_logits_ref(*args, dtype=torch.float64), f"mqa_logits {dtype}", 1e-10)


def test_ragged_e4m3_equals_loop() -> None:
    q, k, weights = ragged(torch.float32)
    q_fp8, q_scale = quantize_index_k(q.flatten(0, 1))
    k_fp8, k_scale = quantize_index_k(k)
    args = (q_fp8.view(6, 4, 128), k_fp8, weights * q_scale.view(6, 4), KS, KE, k_scale)
    got = mqa_logits(*args)
    assert_logits(got, mqa_logits_ref(*args, dtype=torch.float64), "mqa_logits e4m3", 1e-10)


def test_block_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*ragged(torch.float32), KS, KE)
    want = mqa_logits(*args)
    monkeypatch.setattr(mqa_logits_torch, "BLOCK_BYTES", 4 * 4 * 50 * 4)  # four rows a block
    assert_logits(mqa_logits(*args), want, "row blocks", 1e-12)


@pytest.mark.parametrize("shape", TINY_INDEXER, ids=lambda s: s.name)
def test_paged_equals_loop(shape: IndexerShape) -> None:
    p = paged_indexer(shape)
    pages = poison_unused_pages(p.index_cache, p.cache_seqlens, p.block_table)
    rest = (p.weights, p.cache_seqlens, p.block_table, p.max_context)
    got = paged_mqa_logits(p.q, pages, *rest)
    want = paged_mqa_logits_ref(p.q, p.index_cache, *rest, dtype=torch.float64)
    assert_logits(got, want, f"paged_mqa_logits {shape.name}", 1e-10)


def test_paged_equals_ragged_and_float_keys() -> None:
    shape = TINY_INDEXER[-1]
    p = paged_indexer(shape, seed=2)
    got = paged_mqa_logits(
        p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table, p.max_context
    )
    keys = load_index_k(p.index_cache, torch.arange(p.index_cache.shape[0] * 64))
    floats = paged_mqa_logits(p.q, keys, p.weights, p.cache_seqlens, p.block_table, p.max_context)
    assert_bitwise(floats, got, "float index cache")
    for request, length in enumerate(shape.lengths):
        slots = p.block_table[request].repeat_interleave(64)[:length].long() * 64
        slots = slots + torch.arange(length) % 64
        end = length - shape.next_n + 1 + torch.arange(shape.next_n)
        want = mqa_logits(p.q[request], keys[slots], p.weights[request], torch.zeros_like(end), end)
        rows = slice(request * shape.next_n, (request + 1) * shape.next_n)
        assert_logits(got[rows, :length], want, f"request {request}", 1e-12)


def test_permuting_keys_permutes_scores() -> None:
    q, k, weights = ragged(torch.float32)
    order = torch.randperm(50, generator=generator(1))
    whole = torch.zeros(6, dtype=torch.int32), torch.full((6,), 50, dtype=torch.int32)
    want = mqa_logits(q, k, weights, *whole)[:, order]
    assert_logits(mqa_logits(q, k[order], weights, *whole), want, "permuted keys", 1e-12)


@pytest.mark.parametrize("length", [-4, -3, -2, -1, 0, 1])
@pytest.mark.parametrize("next_n", [1, 2])
def test_idle_rows_touch_no_page(length: int, next_n: int) -> None:
    p = paged_indexer(IndexerShape(name="idle", lengths=(length,), next_n=next_n, num_heads=2))
    got = paged_mqa_logits(p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table, 64)
    visible = [max(0, length - next_n + row + 1) for row in range(next_n)]
    assert [int((row > float("-inf")).sum()) for row in got] == visible


def test_refusals_name_the_argument() -> None:
    q, k, weights = ragged(torch.float32)
    with pytest.raises(ValueError, match="e4m3 keys need k_scale"):
        mqa_logits(q, k.to(torch.float8_e4m3fn), weights, KS, KE)
    with pytest.raises(ValueError, match=r"weights is \[6, 3\].*num_heads=4"):
        mqa_logits(q, k, weights[:, :3], KS, KE)
    p = paged_indexer(TINY_INDEXER[0])
    with pytest.raises(ValueError, match="block_table covers 64 positions"):
        paged_mqa_logits(p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table, 65)
