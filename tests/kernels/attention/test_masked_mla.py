"""Masked MLA over a whole context.

| test | catches |
| --- | --- |
| equals fp64 loop, dense and selected | mask, scale, missing rotary part |
| the three prefill forms agree, L around pages and index_topk (T01) | a form that sees other positions |
| a row that sees nothing gives zeros and -inf (T07) | NaN from an empty softmax |
| chunks of rows equal the whole | a chunk that loses its rows |
"""

import pytest
import torch
from glm_kernels.attention.masked_mla import masked_mla
from glm_kernels.attention.masked_mla_ref import masked_mla_ref
from glm_kernels.attention.masked_mla_torch import masked_mla_torch
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.indexer.topk_indices import topk_indices
from glm_kernels.testing.generate import generator
from glm_kernels.testing.numeric import assert_attention, assert_lse

SCALE = 256**-0.5


def draw(
    num_rows: int, context: int, heads: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = generator(num_rows * 10007 + context)
    q = torch.randn(num_rows, heads, 576, generator=gen)
    latents = torch.randn(context, 576, generator=gen)
    lengths = torch.arange(context - num_rows + 1, context + 1)
    return q, latents, lengths


def select(lengths: torch.Tensor, context: int, k: int) -> torch.Tensor:
    scores = torch.randn(len(lengths), context, generator=generator(k))
    return topk_indices(scores, k, torch.zeros_like(lengths), lengths)


@pytest.mark.parametrize(
    ("num_rows", "context", "k"), [(1, 1, 4), (3, 3, 2), (5, 40, 8), (4, 70, None)]
)
def test_equals_loop(num_rows: int, context: int, k: int | None) -> None:
    q, latents, lengths = draw(num_rows, context)
    topk = None if k is None else select(lengths, context, k)
    out, lse = masked_mla(q, latents, lengths, SCALE, topk)
    want, want_lse = masked_mla_ref(q, latents, lengths, SCALE, topk, torch.float64)
    assert_attention(out, want, "masked", atol=2e-6, rtol=1e-5, cosine=1e-11)
    assert_lse(lse, want_lse, "masked")


@pytest.mark.parametrize("context", [1, 2, 63, 64, 65, 2047, 2048, 2049])
@pytest.mark.parametrize("index_topk", [8, 2048])
def test_forms_agree(context: int, index_topk: int) -> None:
    num_rows = min(context, 6)
    q, latents, lengths = draw(num_rows, context)
    topk = select(lengths, context, index_topk)
    shuffled = torch.randperm(context + 64, generator=generator(context))[:context]
    cache = torch.full((context + 64, 1, 576), float("nan"))
    cache[shuffled, 0] = latents
    slots = shuffled[topk.clamp_min(0).long()].int().masked_fill(topk < 0, -1)
    masked, masked_lse = masked_mla(q, latents, lengths, SCALE, topk)
    sparse, sparse_lse = sparse_mla(q, cache, slots, SCALE)
    assert_attention(sparse, masked.double(), "sparse = masked", atol=2e-6, rtol=1e-5, cosine=1e-11)
    assert_lse(sparse_lse, masked_lse, "sparse = masked")
    if context <= index_topk:
        dense, dense_lse = masked_mla(q, latents, lengths, SCALE)
        assert_attention(
            dense, masked.double(), "dense = masked", atol=2e-6, rtol=1e-5, cosine=1e-11
        )
        assert_lse(dense_lse, masked_lse, "dense = masked")


def test_row_that_sees_nothing() -> None:
    q, latents, _ = draw(3, 10)
    out, lse = masked_mla(q, latents, torch.tensor([0, 4, -1]), SCALE)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == float("-inf")).all()
    assert out[1].isfinite().all() and out[1].any()


def test_chunks_equal_whole() -> None:
    q, latents, lengths = draw(7, 90)
    topk = select(lengths, 90, 16)
    whole = masked_mla_torch(q, latents, lengths, SCALE, topk)
    pieces = masked_mla_torch(q, latents, lengths, SCALE, topk, chunk_bytes=1)
    assert torch.allclose(whole[0], pieces[0], atol=1e-6) and torch.allclose(
        whole[1], pieces[1], atol=1e-6
    )
