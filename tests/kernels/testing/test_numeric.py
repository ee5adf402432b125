"""The comparators themselves: each must reject the fault that it exists for.

| test | catches |
| --- | --- |
| bitwise rejects one bit, a sign of zero, a dtype | a comparator that passes on == |
| logits rejects a moved mask and a wrong value | masks compared loosely |
| attention rejects NaN and one bad element | NaN passing through a comparison |
| lse rejects a finite value for -inf | nan_to_num style comparisons |
"""

import pytest
import torch
from glm_kernels.testing.numeric import assert_attention, assert_bitwise, assert_logits, assert_lse

INF = float("inf")


def test_bitwise_rejects_small_differences() -> None:
    assert_bitwise(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), "equal")
    for got in (torch.tensor([0.0, 1.0000001]), torch.tensor([-0.0, 1.0])):
        with pytest.raises(AssertionError, match="1 of 2 elements differ"):
            assert_bitwise(got, torch.tensor([0.0, 1.0]), "x")
    with pytest.raises(AssertionError, match="expected"):
        assert_bitwise(torch.zeros(2), torch.zeros(2, dtype=torch.int32), "x")


def test_logits_rejects_mask_and_value() -> None:
    want = torch.tensor([[1.0, 2.0, -INF]])
    assert_logits(want.clone(), want, "equal")
    for got in (
        [[1.0, 2.0, 0.0]],
        [[1.0, -INF, -INF]],
        [[1.0, 2.1, -INF]],
        [[float("nan"), 2.0, -INF]],
    ):
        with pytest.raises(AssertionError):
            assert_logits(torch.tensor(got), want, "x")


def test_attention_rejects_nan_and_one_bad_element() -> None:
    want = torch.ones(4, 8)
    assert_attention(want, want, "equal")
    for bad in (float("nan"), 1.1, INF):
        got = want.clone()
        got[2, 3] = bad
        with pytest.raises(AssertionError, match=r"\[2, 3\]"):
            assert_attention(got, want, "x")


def test_lse_rejects_finite_for_infinite() -> None:
    want = torch.tensor([1.0, -INF])
    assert_lse(want.clone(), want, "equal")
    for got in ([1.0, -1e30], [-INF, -INF], [1.01, -INF], [float("nan"), -INF]):
        with pytest.raises(AssertionError):
            assert_lse(torch.tensor(got), want, "x")
