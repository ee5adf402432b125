"""Reads a checkpoint's tensors as FP32 and arranges them as transformers' modules hold them.

Written apart from transformers' loader so that FP8 blocks are dequantised exactly and the MTP
layer, which transformers drops, can be loaded into a decoder layer of its own.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from sglang_glm.checkpoint.fp8 import dequantize_blocks

if TYPE_CHECKING:
    from pathlib import Path

_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors, dequantising FP8 blocks.

    Args:
        directory: A checkpoint with ``model.safetensors`` or an index.

    Returns:
        Name to FP32 tensor; ``weight_scale_inv`` entries are folded into their weights.

    Raises:
        ValueError: If an FP8 weight has no scale, or the files are missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise ValueError(
            f"read_weights: {directory} has neither model.safetensors nor an index, "
            "expected a checkpoint directory"
        )
    stored: dict[str, torch.Tensor] = {}
    for name in names:
        with safe_open(directory / name, framework="pt") as file:
            stored.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118

    weights: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = stored.get(f"{name}_scale_inv")
            if scale is None:
                raise ValueError(f"read_weights: {name} is FP8 but {name}_scale_inv is missing")
            weights[name] = dequantize_blocks(tensor, scale)
        else:
            weights[name] = tensor.float()
    return weights


def stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge the experts' matrices as transformers' ``GlmMoeDsaExperts`` holds them.

    Args:
        weights: Checkpoint names to tensors.

    Returns:
        The same with every ``experts.{e}.{gate,up,down}_proj.weight`` replaced by
        ``experts.gate_up_proj``, ``[experts, 2 * width, hidden]`` with the gate first, and
        ``experts.down_proj``, ``[experts, hidden, width]``.
    """
    stacked: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in weights.items():
        match = _EXPERT.match(name)
        if match is None:
            stacked[name] = tensor
        else:
            prefix, expert, role = match.groups()
            parts.setdefault(prefix, {})[int(expert), role] = tensor
    for prefix, tensors in parts.items():
        experts = sorted({expert for expert, _ in tensors})
        stacked[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([tensors[e, "gate"], tensors[e, "up"]]) for e in experts]
        )
        stacked[f"{prefix}.down_proj"] = torch.stack([tensors[e, "down"] for e in experts])
    return stacked


def split_nextn(
    weights: dict[str, torch.Tensor], num_hidden_layers: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Separate the target's tensors from the MTP layer's.

    Args:
        weights: Checkpoint names to tensors.
        num_hidden_layers: Of the target; the MTP layer has this index.

    Returns:
        The target's tensors, and the MTP layer's with ``model.layers.{index}.`` removed.
    """
    prefix = f"model.layers.{num_hidden_layers}."
    target = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    nextn = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
    return target, nextn
