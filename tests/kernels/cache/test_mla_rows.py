"""Packed latent rows.

| test | catches |
| --- | --- |
| layout constants | an offset that drifted from 512 + 16 + 128 |
| pack equals loop, bytes | wrong group, wrong scale position, rounding that differs |
| unpack equals loop, bytes | wrong dtype view of a field |
| round trip within half an e4m3 step (T31) | scale applied the wrong way round |
| zero group and huge values | 0 * inf = NaN; overflow to NaN instead of 448 |
| non-contiguous input | strides ignored |
| refusals name the argument | a silent wrong shape |
"""

import pytest
import torch
from glm_kernels.cache import layout
from glm_kernels.cache.mla_rows import pack_mla_rows, unpack_mla_rows
from glm_kernels.cache.mla_rows_ref import pack_mla_rows_ref, unpack_mla_rows_ref
from glm_kernels.testing.generate import generator
from glm_kernels.testing.numeric import assert_bitwise

DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def rows(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(seed)
    spread = 10.0 ** torch.randint(-3, 3, (num_tokens, 4, 1), generator=rng)
    latent = (torch.randn(num_tokens, 4, 128, generator=rng) * spread).flatten(1)
    return latent.to(dtype), torch.randn(num_tokens, 64, generator=rng).to(dtype)


def test_layout_constants() -> None:
    assert (layout.MLA_SCALE_OFFSET, layout.MLA_ROPE_OFFSET, layout.MLA_ROW_BYTES) == (
        512,
        528,
        656,
    )
    assert layout.mla_row_offset(3) == 1968


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_pack_equals_loop(num_tokens: int, dtype: torch.dtype) -> None:
    latent, rope = rows(num_tokens, dtype)
    assert_bitwise(pack_mla_rows(latent, rope), pack_mla_rows_ref(latent, rope), f"pack {dtype}")


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_unpack_equals_loop(num_tokens: int) -> None:
    packed = pack_mla_rows(*rows(num_tokens, torch.bfloat16))
    assert_bitwise(unpack_mla_rows(packed), unpack_mla_rows_ref(packed), "unpack")


def test_round_trip_within_half_a_step() -> None:
    latent, rope = rows(64, torch.float32, seed=3)
    back = unpack_mla_rows(pack_mla_rows(latent, rope))
    groups, got = latent.view(-1, 4, 128), back[:, :512].view(-1, 4, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    # e4m3 has three mantissa bits: half a step is 1/16 of the value, at least half a subnormal.
    bound = torch.maximum(groups.abs() / 16, scale * 2.0**-10) * 1.0001
    assert ((groups - got).abs() <= bound).all()
    assert_bitwise(back[:, 512:], rope.bfloat16().float(), "rope")


def test_zero_group_and_large_values() -> None:
    latent, rope = rows(2, torch.float32)
    latent[0, 128:256] = 0
    latent[1] *= 1e30
    back = unpack_mla_rows(pack_mla_rows(latent, rope))
    assert back.isfinite().all()
    assert (back[0, 128:256] == 0).all()


def test_non_contiguous_input() -> None:
    joined = torch.randn(5, 700, generator=generator(1))
    got = pack_mla_rows(joined[:, 30:542], joined[:, 600:664])
    want = pack_mla_rows(joined[:, 30:542].contiguous(), joined[:, 600:664].contiguous())
    assert_bitwise(got, want, "strided pack")
    wide = torch.cat([got, got], dim=1)
    assert_bitwise(unpack_mla_rows(wide[:, 656:]), unpack_mla_rows(want), "strided unpack")


def test_refusals_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"pack_mla_rows: k_rope is \[2, 65\]"):
        pack_mla_rows(torch.zeros(2, 512), torch.zeros(2, 65))
    with pytest.raises(ValueError, match=r"num_tokens=2"):
        pack_mla_rows(torch.zeros(2, 512), torch.zeros(3, 64))
    with pytest.raises(ValueError, match=r"unpack_mla_rows: rows"):
        unpack_mla_rows(torch.zeros(2, 656))
