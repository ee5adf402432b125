"""Sparse MLA.

| test | catches |
| --- | --- |
| equals fp64 loop; holes anywhere; poisoned rows (T06, T07, T31) | -1 read as a row, NaN from padding |
| token without slots gives zeros and -inf (T07) | NaN from an empty softmax |
| every slot selected equals dense attention (T01's kernel) | scale, missing rotary part |
| one slot returns that row | value taken from the wrong half |
| order of slots does not matter | position leaking in |
| chunks equal the whole | a chunk that loses its rows |
| 8 heads alone equal 8 of 64 (T31) | head padding that leaks |
| packed within e4m3 of fp32 (T31) | scales of the wrong group |
"""

import pytest
import torch
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_ref import sparse_mla_ref
from glm_kernels.attention.sparse_mla_torch import sparse_mla_torch
from glm_kernels.cache.mla_rows import pack_mla_rows
from glm_kernels.testing.generate import generator, sparse_mla_inputs
from glm_kernels.testing.numeric import assert_attention, assert_bitwise, assert_lse, calc_diff
from glm_kernels.testing.poison import poison_unreferenced_rows
from glm_kernels.testing.shapes import TINY_MLA, MlaShape

SHAPE = TINY_MLA[-1]


@pytest.mark.parametrize("shape", TINY_MLA, ids=lambda s: s.name)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("hole_rate", [0.0, 0.3])
def test_equals_loop(shape: MlaShape, packed: bool, hole_rate: float) -> None:
    x = sparse_mla_inputs(shape, packed, hole_rate=hole_rate)
    cache = poison_unreferenced_rows(x.kv_cache, x.slots)
    out, lse = sparse_mla(x.q, cache, x.slots, x.softmax_scale)
    want, want_lse = sparse_mla_ref(x.q, x.kv_cache, x.slots, x.softmax_scale, torch.float64)
    what = f"sparse_mla {shape.name} packed={packed}"
    assert_attention(out, want, what, atol=2e-6, rtol=1e-5, cosine=1e-11)
    assert_lse(lse, want_lse, what)


def test_bf16_equals_loop() -> None:
    x = sparse_mla_inputs(SHAPE, False, dtype=torch.bfloat16, hole_rate=0.2)
    out, _ = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    want, _ = sparse_mla_ref(x.q, x.kv_cache, x.slots, x.softmax_scale, torch.float64)
    assert out.dtype == torch.bfloat16
    assert_attention(out, want, "bf16")


@pytest.mark.parametrize("packed", [False, True])
def test_no_slot_gives_zeros(packed: bool) -> None:
    x = sparse_mla_inputs(SHAPE, packed)
    slots = torch.full_like(x.slots, -1)
    cache = poison_unreferenced_rows(x.kv_cache, slots)
    out, lse = sparse_mla(x.q, cache, slots, x.softmax_scale)
    assert (out == 0).all() and (lse == float("-inf")).all()
    mixed = slots.clone()
    mixed[0, 3] = 5
    out, lse = sparse_mla(x.q, poison_unreferenced_rows(x.kv_cache, mixed), mixed, x.softmax_scale)
    assert out.isfinite().all() and (out[1:] == 0).all() and (lse[1:] == float("-inf")).all()


def test_all_slots_equal_dense_attention() -> None:
    x = sparse_mla_inputs(SHAPE, False)
    slots = torch.arange(SHAPE.num_slots, dtype=torch.int32).expand(SHAPE.num_tokens, -1)
    out, _ = sparse_mla(x.q, x.kv_cache, slots, x.softmax_scale)
    rows = x.kv_cache[:, 0].double()
    scores = torch.einsum("thd,sd->ths", x.q.double(), rows) * x.softmax_scale
    want = scores.softmax(-1) @ rows[:, :512]
    assert_attention(out, want, "dense", atol=2e-6, rtol=1e-5, cosine=1e-11)


def test_one_slot_returns_its_row() -> None:
    x = sparse_mla_inputs(SHAPE, False)
    slots = torch.full_like(x.slots, -1)
    slots[:, 4] = torch.arange(SHAPE.num_tokens)
    out, lse = sparse_mla(x.q, x.kv_cache, slots, x.softmax_scale)
    for token in range(SHAPE.num_tokens):
        row = x.kv_cache[token, 0]
        assert torch.allclose(out[token], row[:512].expand_as(out[token]), atol=1e-6)
        assert torch.allclose(lse[token], x.q[token] @ row * x.softmax_scale, atol=1e-5)


def test_order_of_slots_does_not_matter() -> None:
    x = sparse_mla_inputs(SHAPE, True, hole_rate=0.2)
    order = torch.randperm(SHAPE.topk, generator=generator(3))
    want, want_lse = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    out, lse = sparse_mla(x.q, x.kv_cache, x.slots[:, order].contiguous(), x.softmax_scale)
    assert_attention(out, want, "order", atol=2e-6, rtol=1e-5, cosine=1e-11)
    assert_lse(lse, want_lse, "order")


def test_chunks_equal_the_whole() -> None:
    x = sparse_mla_inputs(SHAPE, True, hole_rate=0.2)
    whole = sparse_mla_torch(x.q, x.kv_cache, x.slots, x.softmax_scale)
    pieces = sparse_mla_torch(x.q, x.kv_cache, x.slots, x.softmax_scale, chunk_bytes=1)
    assert_attention(pieces[0], whole[0], "chunks", atol=2e-6, rtol=1e-5, cosine=1e-11)


def test_eight_heads_are_eight_of_sixty_four() -> None:
    x = sparse_mla_inputs(SHAPE, True)
    padded = torch.zeros(SHAPE.num_tokens, 64, 576)
    padded[:, : SHAPE.num_heads] = x.q
    want, _ = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    got, _ = sparse_mla(padded, x.kv_cache, x.slots, x.softmax_scale)
    assert_attention(got[:, : SHAPE.num_heads], want, "heads", atol=2e-6, rtol=1e-5, cosine=1e-11)


def test_packed_is_close_to_fp32() -> None:
    x = sparse_mla_inputs(SHAPE, False)
    packed = pack_mla_rows(x.kv_cache[:, 0, :512], x.kv_cache[:, 0, 512:])[:, None]
    want, _ = sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale)
    got, _ = sparse_mla(x.q, packed, x.slots, x.softmax_scale)
    assert 0 < calc_diff(got, want) < 2e-3


def test_empty_and_refusals() -> None:
    x = sparse_mla_inputs(SHAPE, False)
    out, lse = sparse_mla(x.q[:0], x.kv_cache, x.slots[:0], x.softmax_scale)
    assert out.shape == (0, 4, 512) and lse.shape == (0, 4)
    assert_bitwise(
        sparse_mla(x.q, x.kv_cache, x.slots[:, :0], 1.0)[0], torch.zeros(5, 4, 512), "k 0"
    )
    with pytest.raises(ValueError, match="sparse_mla: slots"):
        sparse_mla(x.q, x.kv_cache, x.slots.long(), x.softmax_scale)
