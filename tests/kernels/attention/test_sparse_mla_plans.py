"""Blocks a token for the sparse MLA kernels.

| test | catches |
| --- | --- |
| few tokens are spread, many are not | a plan that leaves the GPU idle, or splits for nothing |
| the kernel for few heads serves many tokens of packed rows only | the slower kernel chosen |
"""

import pytest
import torch
from glm_kernels import _arch
from glm_kernels.attention import sparse_mla as op
from glm_kernels.attention import sparse_mla_few_heads_sm90 as few_heads
from glm_kernels.attention.sparse_mla_few_heads_sm90 import plan_cluster
from glm_kernels.testing.generate import sparse_mla_inputs
from glm_kernels.testing.shapes import MlaShape


# The quickest of the measured sizes (H200, 132 multiprocessors).
@pytest.mark.parametrize(("num_tokens", "cluster"), [(1, 8), (8, 8), (32, 4), (192, 1), (8192, 1)])
def test_cluster(num_tokens: int, cluster: int) -> None:
    assert plan_cluster(num_tokens, 2048, 132) == cluster


def test_a_short_list_is_not_spread() -> None:
    assert plan_cluster(1, 17, 132) == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "packed", "kernel"),
    [
        (64, 8, True, "64 rows"),
        (65, 8, True, "few heads"),
        (65, 3, True, "few heads"),
        (65, 8, False, "64 rows"),
        (65, 16, True, "64 rows"),
    ],
)
def test_kernel_of_a_shape(
    num_tokens: int, num_heads: int, packed: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = MlaShape(name="x", num_tokens=num_tokens, num_heads=num_heads, topk=4, num_slots=8)
    x = sparse_mla_inputs(shape, packed, dtype=torch.bfloat16)
    monkeypatch.setattr(_arch, "use_device_code", lambda *_: True)
    monkeypatch.setattr(op, "sparse_mla_sm90", lambda *_: "64 rows")
    monkeypatch.setattr(few_heads, "sparse_mla_few_heads_sm90", lambda *_: "few heads")
    assert op.sparse_mla(x.q, x.kv_cache, x.slots, x.softmax_scale) == kernel
