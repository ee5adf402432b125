"""The norms before an MTP layer on CUDA.

test_rows_that_the_kernel_refuses    normed here, as RMSNorm defines it: 256 columns, or FP32
test_rows_that_the_kernel_takes      left to SGLang
"""

from __future__ import annotations

import pytest
import torch

from sglang_glm.compat.cuda.eh_norm import fused_eh_norm


def refuse(*_: object) -> torch.Tensor:
    raise RuntimeError("unsupported")


@pytest.mark.parametrize(
    ("width", "dtype"), [(256, torch.bfloat16), (384, torch.float16), (512, torch.float32)]
)
def test_rows_that_the_kernel_refuses(width: int, dtype: torch.dtype) -> None:
    embeds, hidden = (torch.randn(3, width).to(dtype) for _ in range(2))
    weights = [torch.rand(width).to(dtype) + 0.5 for _ in range(2)]
    got = fused_eh_norm(refuse, embeds, hidden, *weights, 1e-5)
    halves = []
    for rows, weight in zip((embeds.double(), hidden.double()), weights, strict=True):
        scale = (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        halves.append(rows * scale * weight.double())
    expected = torch.cat(halves, -1)
    assert got.dtype == dtype
    bound = torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert ((got.double() - expected).abs() <= bound).all()


def test_rows_that_the_kernel_takes() -> None:
    rows, weight = torch.zeros(2, 512, dtype=torch.bfloat16), torch.ones(512)
    taken = torch.full((2, 1024), 7.0)
    got = fused_eh_norm(lambda *_: taken, rows, rows, weight, weight, 1e-5)
    assert got is taken
