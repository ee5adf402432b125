"""Expert selection.

| test | catches |
| --- | --- |
| equals loop | softmax for sigmoid, wrong normalisation |
| bias moves the choice, never the weight | a biased weight |
| weights sum to the factor once (T37) | scaling applied twice or never |
| ties go to the lower expert | an order that varies by device |
"""

import torch
from glm_kernels.moe.topk_gate import topk_gate
from glm_kernels.moe.topk_gate_ref import topk_gate_ref
from glm_kernels.testing.generate import generator
from glm_kernels.testing.numeric import assert_bitwise


def test_equals_loop() -> None:
    rng = generator(0)
    logits, bias = torch.randn(9, 256, generator=rng), torch.randn(256, generator=rng) * 0.1
    weights, ids = topk_gate(logits, bias, 8, 2.5)
    want, want_ids = topk_gate_ref(logits, bias, 8, 2.5)
    assert_bitwise(ids, want_ids, "ids")
    assert torch.allclose(weights, want, rtol=1e-6)


def test_bias_moves_the_choice_only() -> None:
    bias = torch.zeros(16)
    bias[7] = 10.0
    weights, ids = topk_gate(torch.zeros(2, 16), bias, 2, 1.0)
    assert ids.tolist() == [[7, 0]] * 2
    assert torch.equal(weights, torch.full((2, 2), 0.5))


def test_weights_sum_to_the_factor_once() -> None:
    weights, _ = topk_gate(torch.randn(5, 32, generator=generator(1)), torch.zeros(32), 8, 2.5)
    assert torch.allclose(weights.sum(1), torch.full((5,), 2.5))


def test_ties_go_to_the_lower_expert() -> None:
    _, ids = topk_gate(torch.zeros(1, 64), torch.zeros(64), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]
