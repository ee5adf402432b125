"""What a number becomes when it has been through a cache: quantise, then dequantise in FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FP8_MAX = 448.0
LATENT_GROUP = 128
"""Latent values that share one FP32 scale in the 656-byte row."""
INDEX_AMAX_FLOOR = 1e-4
"""Smallest magnitude that the index key's scale is derived from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormats:
    """Number formats of the caches that an oracle imitates.

    Attributes:
        latent: ``fp32``; ``bf16``, 576 BF16 values a token; or ``fp8``, the 656-byte row: 512 e4m3
            values in groups of 128 with an FP32 scale each, and 64 BF16 values.
        index_key: ``fp32``, ``bf16``, or ``fp8``, 128 e4m3 values and one power-of-two scale.
        index_query: ``fp32``, ``bf16``, or ``fp8`` as ``index_key``, one scale a head.
    """

    latent: Literal["fp32", "bf16", "fp8"] = "fp32"
    index_key: Literal["fp32", "bf16", "fp8"] = "fp32"
    index_query: Literal["fp32", "bf16", "fp8"] = "fp32"

    def __post_init__(self) -> None:
        allowed = ("fp32", "bf16", "fp8")
        for field in ("latent", "index_key", "index_query"):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"CacheFormats: {field} is {getattr(self, field)!r}, expected one of {allowed}"
                )


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to BF16 and back.

    Args:
        x: Any shape, floating point.

    Returns:
        Same shape, FP32.
    """
    return x.to(torch.bfloat16).float()


def round_latent_fp8(latent: torch.Tensor) -> torch.Tensor:
    """Round the latent as the 656-byte row stores it.

    Args:
        latent: ``[..., kv_lora_rank]``, floating point; the width a multiple of 128.

    Returns:
        Same shape, FP32: per group of 128, ``e4m3(x * (1 / s)) * s`` with ``s = amax / 448``.

    Raises:
        ValueError: If the width is not a multiple of 128.
    """
    width = latent.shape[-1]
    if width % LATENT_GROUP:
        raise ValueError(
            f"round_latent_fp8: latent is {width} wide, expected a multiple of {LATENT_GROUP}"
        )
    groups = latent.float().unflatten(-1, (width // LATENT_GROUP, LATENT_GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / FP8_MAX
    # An all-zero group has scale 0 and is stored as zeros. The reciprocal is formed
    # first because the writers do: a quotient can round to the other neighbour.
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    codes = (groups * inverse).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def round_index_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round an index key or query head as the FP8 index pages store it.

    Args:
        x: ``[..., index_head_dim]``, floating point.

    Returns:
        Same shape, FP32: ``e4m3(x / s) * s`` with ``s = 2 ^ ceil(log2(max(amax, 1e-4) / 448))``.
    """
    x = x.float()
    ratio = x.abs().amax(-1, keepdim=True).clamp(min=INDEX_AMAX_FLOOR) / FP8_MAX
    # frexp gives a mantissa in [0.5, 1); 0.5 alone is a power of two already.
    mantissa, exponent = torch.frexp(ratio)
    scale = torch.exp2((exponent - (mantissa == 0.5).to(exponent.dtype)).float())
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def round_latent(latent: torch.Tensor, formats: CacheFormats) -> torch.Tensor:
    """Round the latent part of a cache row.

    Args:
        latent: ``[..., kv_lora_rank]``.
        formats: Which rounding.

    Returns:
        Same shape, in ``latent``'s dtype.
    """
    if formats.latent == "fp8":
        return round_latent_fp8(latent).to(latent.dtype)
    return latent if formats.latent == "fp32" else round_bf16(latent).to(latent.dtype)


def round_rope(k_rope: torch.Tensor, formats: CacheFormats) -> torch.Tensor:
    """Round the RoPE part of a cache row: BF16 in both narrow formats.

    Args:
        k_rope: ``[..., qk_rope_head_dim]``.
        formats: Which rounding.

    Returns:
        Same shape, in ``k_rope``'s dtype.
    """
    return k_rope if formats.latent == "fp32" else round_bf16(k_rope).to(k_rope.dtype)


def round_index(x: torch.Tensor, format_name: str) -> torch.Tensor:
    """Round index keys or queries.

    Args:
        x: ``[..., index_head_dim]``.
        format_name: ``fp32``, ``bf16`` or ``fp8``.

    Returns:
        Same shape, in ``x``'s dtype.
    """
    if format_name == "fp8":
        return round_index_fp8(x).to(x.dtype)
    return x if format_name == "fp32" else round_bf16(x).to(x.dtype)
