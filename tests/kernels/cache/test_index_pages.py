"""Index pages.

| test | catches |
| --- | --- |
| layout constants | an offset that drifted from 8192 + 256 |
| quantise equals loop | an exponent off by one, worst at exact powers of two |
| rounding has no bias | truncation instead of rounding |
| store equals loop, shuffled pages (T08) | page stride, scale block, lengths 1, 63..65, 127..129 |
| load equals loop, and the fp8 form | a scale of the neighbour |
| move a page (T08) | keys and scales that travel apart |
| negative slots are skipped (T06) | -1 read as the last page |
| refusals | wrong page width |
"""

import pytest
import torch
from glm_kernels.cache import layout
from glm_kernels.cache.index_pages import (
    load_index_k,
    load_index_k_fp8,
    quantize_index_k,
    store_index_k,
)
from glm_kernels.cache.index_pages_ref import (
    load_index_k_ref,
    quantize_index_k_ref,
    store_index_k_ref,
)
from glm_kernels.testing.generate import generator
from glm_kernels.testing.numeric import assert_bitwise

LENGTHS = [1, 63, 64, 65, 127, 128, 129]


def shuffled_slots(length: int, num_pages: int, seed: int) -> torch.Tensor:
    """Slots of positions 0.. on non-contiguous pages in random order."""
    pages = torch.randperm(num_pages, generator=generator(seed))
    position = torch.arange(length)
    return pages[position // 64] * 64 + position % 64


def test_layout_constants() -> None:
    assert (layout.INDEX_SCALE_OFFSET, layout.INDEX_PAGE_BYTES) == (8192, 8448)
    assert layout.INDEX_BYTES_PER_TOKEN == 132
    assert layout.index_key_offset(65) == 8448 + 128
    assert layout.index_scale_offset(65) == 8448 + 8192 + 4


def test_quantize_equals_loop() -> None:
    k = (
        torch.randn(60, 128, generator=generator(0))
        * 10.0 ** torch.arange(-6, 6).repeat(5)[:, None]
    )
    k[0] = 0
    k[1] = 0
    k[1, 5] = 448.0  # ratio 1: the scale must stay 1
    k[2] = 0
    k[2, 9] = -896.0
    for got, want in zip(quantize_index_k(k), quantize_index_k_ref(k), strict=True):
        assert_bitwise(got, want, "quantize_index_k")
    assert quantize_index_k(k)[1][1:3].tolist() == [1.0, 2.0]


def test_rounding_has_no_bias() -> None:
    k = 1 + torch.rand(4000, 128, generator=generator(1))
    codes, scale = quantize_index_k(k)
    up = (codes.float() * scale[:, None] > k).double()
    assert abs(float(up.mean()) - 0.5) < 10 / up.numel() ** 0.5


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_and_load_equal_loop(length: int, dtype: torch.dtype) -> None:
    slots = shuffled_slots(length, 5, seed=length)
    k = torch.randn(length, 128, generator=generator(length)).to(dtype)
    got = torch.full((5, 8448), 255, dtype=torch.uint8)
    want = got.clone()
    store_index_k(got, slots, k)
    store_index_k_ref(want, slots, k)
    assert_bitwise(got, want, f"store_index_k length {length}")
    assert_bitwise(load_index_k(got, slots), load_index_k_ref(want, slots), f"load length {length}")
    codes, scale = load_index_k_fp8(got, slots.int())
    assert_bitwise(codes, quantize_index_k(k)[0], "codes")
    assert_bitwise(scale, quantize_index_k(k)[1], "scale")


@pytest.mark.parametrize("length", LENGTHS)
def test_moved_pages_keep_their_keys(length: int) -> None:
    slots = shuffled_slots(length, 5, seed=7)
    pages = torch.zeros(5, 8448, dtype=torch.uint8)
    store_index_k(pages, slots, torch.randn(length, 128, generator=generator(2)))
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = torch.full_like(pages, 255)
    moved[order] = pages
    new_slots = order[slots // 64] * 64 + slots % 64
    assert_bitwise(load_index_k(moved, new_slots), load_index_k(pages, slots), f"move {length}")


def test_negative_slots_are_skipped() -> None:
    pages = torch.full((2, 8448), 255, dtype=torch.uint8)
    store_index_k(pages, torch.tensor([-1, 70, -5]), torch.ones(3, 128))
    want = torch.full((2, 8448), 255, dtype=torch.uint8)
    store_index_k(want, torch.tensor([70]), torch.ones(1, 128))
    assert_bitwise(pages, want, "negative slots")


def test_refusals_name_the_argument() -> None:
    with pytest.raises(ValueError, match="store_index_k: pages"):
        store_index_k(
            torch.zeros(2, 8192, dtype=torch.uint8), torch.tensor([1]), torch.ones(1, 128)
        )
    with pytest.raises(ValueError, match="quantize_index_k: k"):
        quantize_index_k(torch.zeros(2, 64))
