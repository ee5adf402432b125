"""RoPE on the CPU."""

from typing import Any

import torch


def get_rope_wrapper(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> torch.nn.Module:
    """The module that CUDA gets too; SGLang's CPU variant calls AMX kernels."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(
        head_size,
        rotary_dim,
        max_position,
        base,
        is_neox_style,
        rope_scaling,
        dtype,
        partial_rotary_factor,
    )
