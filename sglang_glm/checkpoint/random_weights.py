"""Draws the tensors of a checkpoint; the same bytes on every machine and library version."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec
    from sglang_glm.checkpoint.tensors import TensorSpec


def _stream(seed: int, name: str, count: int) -> np.ndarray:
    # numpy promises the raw output of a bit generator across versions, but not
    # that of its distributions; torch promises neither. [count], uint64
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(count)


def _bell(raw: np.ndarray) -> np.ndarray:
    # Sum of four 16-bit uniforms: unit variance, zero mean, tails at 3.46, and exact
    # in integers, so that no maths library has a say in the last bit.
    total = np.zeros(raw.shape, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    centred = total - 2 * 0xFFFF
    return centred / np.sqrt(4 * (65536.0**2 - 1) / 12)


def _uniform(raw: np.ndarray) -> np.ndarray:
    return (raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0  # [-1, 1)


def draw_tensor(spec: CheckpointSpec, tensor: TensorSpec) -> torch.Tensor:
    """Draw one tensor from the checkpoint's seed and the tensor's name.

    Args:
        spec: Gives the seed, and the layer whose ``embed_tokens`` and ``shared_head.head`` are
            copies of the target's.
        tensor: What to draw.

    Returns:
        ``tensor.shape``, BF16; FP32 for the router's correction bias, as in released checkpoints.
    """
    nextn = f"model.layers.{spec.num_hidden_layers}."
    source = {
        f"{nextn}embed_tokens.weight": "model.embed_tokens.weight",
        f"{nextn}shared_head.head.weight": "lm_head.weight",
    }.get(tensor.name, tensor.name)
    raw = _stream(spec.seed, source, int(np.prod(tensor.shape)))
    if tensor.kind == "norm":
        values = 1.0 + tensor.gain * _uniform(raw)
    elif tensor.kind == "linear":
        values = _bell(raw).reshape(tensor.shape) / np.sqrt(tensor.shape[-1])
        tail_rows, tail_gain = tensor.tail or (0, 1.0)
        body_rows = tensor.shape[0] - tail_rows
        values[:body_rows] *= tensor.gain
        values[body_rows:] *= tail_gain
    else:
        values = tensor.gain * _bell(raw)
    drawn = torch.from_numpy(values.astype(np.float32)).view(tensor.shape)
    return drawn if tensor.kind == "router_bias" else drawn.to(torch.bfloat16)
