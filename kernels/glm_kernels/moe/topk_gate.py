"""Expert selection of the ``noaux_tc`` router with one group."""

import torch

from glm_kernels._checks import FLOAT_DTYPES, Dims, require


def topk_gate(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor,
    num_topk: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased sigmoid and weigh them by the unbiased one.

    ::

        gate    = sigmoid(router_logits.float())
        ids     = top(gate + correction_bias, num_topk)   # equal sums: lower expert first
        weights = gate[ids] / sum(gate[ids]) * routed_scaling_factor

    Args:
        router_logits: ``[num_tokens, num_experts]``, float.
        correction_bias: ``[num_experts]``, float. Takes part in the choice only.
        num_topk: experts a token, at most ``num_experts``.
        routed_scaling_factor: factor of the normalised weights, applied here and nowhere else.

    Returns:
        weights: ``[num_tokens, num_topk]``, fp32, biased score descending.
        ids: ``[num_tokens, num_topk]``, int32.

    Raises:
        ValueError: on a shape, dtype or device mismatch, or too few experts.
    """
    dims = Dims("topk_gate")
    dims.check("router_logits", router_logits, ("num_tokens", "num_experts"), FLOAT_DTYPES)
    dims.check("correction_bias", correction_bias, ("num_experts",), FLOAT_DTYPES)
    enough = 0 < num_topk <= dims["num_experts"]
    require("topk_gate", enough, f"num_topk is {num_topk}, expected 1 to {dims['num_experts']}")
    gate = router_logits.float().sigmoid()
    order = (gate + correction_bias.float()).sort(dim=1, descending=True, stable=True).indices
    ids = order[:, :num_topk]
    chosen = gate.gather(1, ids)
    return chosen / chosen.sum(1, keepdim=True) * routed_scaling_factor, ids.int()
