"""Draws the tensors of a checkpoint; the same bytes on every machine and library version."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec
    from sglang_glm.checkpoint.tensors import TensorSpec


_CHUNK = 2**24
"""Numbers drawn at a time: a tensor of any size costs its BF16 bytes and a few hundred MB."""


def _generator(seed: int, name: str) -> np.random.PCG64:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little"))


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


def _source_name(spec: CheckpointSpec, name: str) -> str:
    # The MTP layer's embedding and head are copies of the target's.
    nextn = f"model.layers.{spec.num_hidden_layers}."
    return {
        f"{nextn}embed_tokens.weight": "model.embed_tokens.weight",
        f"{nextn}shared_head.head.weight": "lm_head.weight",
    }.get(name, name)


def _values(tensor: TensorSpec, raw: np.ndarray, start: int) -> np.ndarray:
    # Elements `start` onwards of the flattened tensor.
    if tensor.kind == "norm":
        return 1.0 + tensor.gain * _uniform(raw)
    if tensor.kind != "linear":
        return tensor.gain * _bell(raw)
    values = _bell(raw) / np.sqrt(tensor.shape[-1])
    tail_rows, tail_gain = tensor.tail or (0, 1.0)
    body = (tensor.shape[0] - tail_rows) * tensor.shape[-1] - start
    values[: max(body, 0)] *= tensor.gain
    values[max(body, 0) :] *= tail_gain
    return values


def draw_tensor(spec: CheckpointSpec, tensor: TensorSpec) -> torch.Tensor:
    """Draw one tensor from the checkpoint's seed and the tensor's name.

    Args:
        spec: Gives the seed, and the layer whose ``embed_tokens`` and ``shared_head.head`` are
            copies of the target's.
        tensor: What to draw.

    Returns:
        ``tensor.shape``, BF16; FP32 for the router's correction bias, as in released checkpoints.
    """
    # numpy promises the raw output of a bit generator across versions, but not
    # that of its distributions; torch promises neither.
    generator = _generator(spec.seed, _source_name(spec, tensor.name))
    dtype = torch.float32 if tensor.kind == "router_bias" else torch.bfloat16
    drawn = torch.empty(tensor.shape, dtype=dtype)
    flat = drawn.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        count = min(_CHUNK, flat.numel() - start)
        values = _values(tensor, generator.random_raw(count), start)
        flat[start : start + count] = torch.from_numpy(values.astype(np.float32))
    return drawn
