"""Expert selection, one token at a time."""

import torch


def topk_gate_ref(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor,
    num_topk: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loop form of ``topk_gate``.

    Args:
        router_logits: ``[num_tokens, num_experts]``, float.
        correction_bias: ``[num_experts]``, float.
        num_topk: experts a token.
        routed_scaling_factor: factor of the normalised weights.

    Returns:
        ``[num_tokens, num_topk]`` fp32 weights and int32 expert ids.
    """
    weights = torch.empty(router_logits.shape[0], num_topk)
    ids = torch.empty(router_logits.shape[0], num_topk, dtype=torch.int32)
    for token in range(router_logits.shape[0]):
        gate = router_logits[token].float().sigmoid()  # [num_experts]
        biased = (gate + correction_bias.float()).tolist()
        best = sorted(range(len(biased)), key=lambda expert: -biased[expert])[:num_topk]
        chosen = gate[best]
        weights[token] = chosen / chosen.sum() * routed_scaling_factor
        ids[token] = torch.tensor(best, dtype=torch.int32)
    return weights, ids
