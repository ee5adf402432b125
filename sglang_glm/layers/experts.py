"""Routed experts on the CPU, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, StandardDispatchOutput
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod


def experts_forward(
    self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, dispatch_output: StandardDispatchOutput
) -> CombineInput:
    """Sum of the chosen experts' outputs, weighted.

    ::

        out[t] = sum_j topk_weights[t, j] * w2[e] @ (silu(w1[e] @ x[t]) * (w3[e] @ x[t])),  e = topk_ids[t, j]

    Args:
        self: SGLang's method object.
        layer: Holds `w13_weight` `[experts, 2 * width, hidden]` and `w2_weight` `[experts, hidden, width]`.
        dispatch_output: Hidden states `[num_tokens, hidden]`; local expert ids `[num_tokens, num_topk]`, -1 for
            an expert of another rank, whose share that rank adds.

    Returns:
        Hidden states of the same shape. The routed scaling factor is the MoE block's, not applied here.
        A layer with another activation takes SGLang's own form.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = self.moe_runner_config
    if config.activation != "silu" or config.apply_router_weight_on_input:
        return self.forward_native(layer, dispatch_output)
    hidden_states = dispatch_output.hidden_states
    w13, w2 = layer.get_parameter("w13_weight"), layer.get_parameter("w2_weight")
    topk_weights, topk_ids = dispatch_output.topk_output[:2]
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    # Tokens grouped by expert: one product an expert, however many tokens chose it.
    token, choice = (topk_ids >= 0).nonzero(as_tuple=True)
    expert = topk_ids[token, choice].long()
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=w13.shape[0]).tolist()
    start = 0
    for expert_id, count in enumerate(counts):
        if count == 0:
            continue
        chosen = order[start : start + count]
        start += count
        rows = token[chosen]
        gate_up = F.linear(hidden_states[rows], w13[expert_id])
        gate, up = gate_up.chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, w2[expert_id])
        out.index_add_(0, rows, down.float() * topk_weights[rows, choice[chosen], None].float())
    return StandardCombineInput(hidden_states=out.to(hidden_states.dtype))
