"""Latent writes.

| test | catches |
| --- | --- |
| equals loop for fp32, bf16 and packed caches | wrong field order, wrong dtype |
| other rows untouched, negative slots skipped (T06) | -1 read as the last row |
| int32 and int64 slots agree | a 32-bit view |
| empty input | a launch over nothing |
"""

import pytest
import torch
from glm_kernels.cache.store_mla_kv import store_mla_kv
from glm_kernels.cache.store_mla_kv_ref import store_mla_kv_ref
from glm_kernels.testing.generate import generator
from glm_kernels.testing.numeric import assert_bitwise

CACHES = [(torch.float32, 576), (torch.bfloat16, 576), (torch.uint8, 656)]


@pytest.mark.parametrize(("dtype", "width"), CACHES)
@pytest.mark.parametrize("slots", [[5, 0, 19, 7], [3, -1, 12, -7], []])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_equals_loop(
    dtype: torch.dtype, width: int, slots: list[int], slot_dtype: torch.dtype
) -> None:
    rng = generator(len(slots))
    got = torch.full((20, 1, width), 77, dtype=dtype)
    want = got.clone()
    latent = torch.randn(len(slots), 512, generator=rng).bfloat16()
    rope = torch.randn(len(slots), 64, generator=rng).bfloat16()
    mapping = torch.tensor(slots, dtype=slot_dtype)
    store_mla_kv(got, mapping, latent, rope)
    store_mla_kv_ref(want, mapping, latent, rope)
    assert_bitwise(got, want, f"store_mla_kv {dtype} {slots}")


def test_refuses_a_packed_width_with_floats() -> None:
    with pytest.raises(ValueError, match=r"store_mla_kv: kv_cache is \[4, 1, 656\]"):
        store_mla_kv(
            torch.zeros(4, 1, 656), torch.tensor([1]), torch.zeros(1, 512), torch.zeros(1, 64)
        )
