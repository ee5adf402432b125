"""The parameters: drawn, and their names in training against those in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.tensors import model_tensors

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec

Parameters = dict[str, torch.Tensor]


def init_parameters(spec: CheckpointSpec, seed: int, device: str) -> Parameters:
    """Draw the initial parameters.

    Args:
        spec: Dimensions.
        seed: Of the draw.
        device: Where they live.

    Returns:
        Checkpoint name to FP32 parameter; each layer's experts are stacked under
        ``mlp.experts.gate_proj``, ``up_proj`` ``[experts * width, hidden]`` and ``down_proj``
        ``[hidden, experts * width]``.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: Parameters = {}
    depth = 2 * (spec.num_hidden_layers + 1)
    for tensor in model_tensors(spec):
        if tensor.kind == "norm":
            value = torch.ones(tensor.shape)
        elif tensor.kind in ("shift", "router_bias"):
            value = torch.zeros(tensor.shape)
        else:
            value = torch.randn(tensor.shape, generator=generator)
            if tensor.kind == "embedding":
                value *= 0.5
            else:
                value *= tensor.shape[1] ** -0.5
                if tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
                    value *= depth**-0.5
                elif tensor.name == "lm_head.weight":
                    value *= 0.3
        drawn[tensor.name] = value
    return {name: value.to(device).requires_grad_() for name, value in stack(drawn, spec).items()}


def stack(tensors: Parameters, spec: CheckpointSpec) -> Parameters:
    """Join each layer's experts.

    Args:
        tensors: Names as in a checkpoint.
        spec: Dimensions.

    Returns:
        Names as in :func:`init_parameters`.
    """
    joined = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for layer in range(spec.num_hidden_layers + 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.0.gate_proj.weight" not in tensors:
            continue
        for role, axis in (("gate", 0), ("up", 0), ("down", 1)):
            parts = [
                tensors[f"{prefix}.{expert}.{role}_proj.weight"]
                for expert in range(spec.n_routed_experts)
            ]
            joined[f"{prefix}.{role}_proj"] = torch.cat(parts, axis)
    return joined


def unstack(tensors: Parameters, spec: CheckpointSpec) -> Parameters:
    """Undo :func:`stack`."""
    split: Parameters = {}
    for name, value in tensors.items():
        prefix, _, role = name.rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            split[name] = value
            continue
        axis = 1 if role == "down_proj" else 0
        for expert, part in enumerate(value.chunk(spec.n_routed_experts, axis)):
            split[f"{prefix}.{expert}.{role}.weight"] = part
    return split
