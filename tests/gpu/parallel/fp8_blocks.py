"""Rows as DeepEP carries them in FP8: e4m3 codes and an fp32 scale per 128 values."""

import torch

BLOCK, MAX_CODE = 128, 448.0


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, hidden]` to codes of the same shape and `[n, hidden / 128]` scales to multiply by."""
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=2).clamp_min(1e-4) / MAX_CODE
    codes = (blocks / scale[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes `[..., hidden]` and scales `[..., hidden / 128]`."""
    blocks = codes.float().unflatten(-1, (-1, BLOCK))
    return (blocks * scales.float()[..., None]).flatten(-2)
