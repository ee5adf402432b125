"""Packed 656-byte latent rows: quantise and dequantise."""

import torch

from glm_kernels._checks import FLOAT_DTYPES, Dims
from glm_kernels.cache import layout


def pack_mla_rows(latent: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Quantise latents and join them with the rotary part into packed rows.

    For each group g of 128 latent values::

        scale = amax(|x_g|) * fp32(1 / 448)
        codes = e4m3(clamp(x_g * (1 / scale), -448, 448))

    Args:
        latent: ``[num_tokens, 512]``, float. Normalised KV latent.
        k_rope: ``[num_tokens, 64]``, float. Rotated key part, stored as bf16.

    Returns:
        ``[num_tokens, 656]``, uint8: 512 code bytes, 16 scale bytes, 128 rotary bytes.

    Raises:
        ValueError: on a shape, dtype or device mismatch.

    Notes:
        The bytes are those that SGLang's ``quantize_k_cache`` writes on a GPU, but for all-zero
        groups: those are stored as zero codes with scale 0, SGLang's hold codes of 448 with scale
        0. Both read back as zero. Empty input gives an empty result.
    """
    dims = Dims("pack_mla_rows")
    dims.check("latent", latent, ("num_tokens", layout.KV_LORA_RANK), FLOAT_DTYPES)
    dims.check("k_rope", k_rope, ("num_tokens", layout.QK_ROPE_HEAD_DIM), FLOAT_DTYPES)
    groups = latent.float().unflatten(-1, (layout.MLA_NUM_SCALES, layout.MLA_GROUP))
    scale = groups.abs().amax(-1) * layout.FP8_MAX_INVERSE  # [num_tokens, 4]
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    codes = (groups * inverse[..., None]).clamp(-layout.FP8_MAX, layout.FP8_MAX)
    return torch.cat(
        [
            codes.to(torch.float8_e4m3fn).flatten(1).view(torch.uint8),
            scale.view(torch.uint8),
            k_rope.to(torch.bfloat16).contiguous().view(torch.uint8),
        ],
        dim=1,
    )


def unpack_mla_rows(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dequantise packed rows: ``codes * scale`` a group, then the rotary part.

    Args:
        rows: ``[num_tokens, 656]``, uint8.
        dtype: dtype of the result; the product is formed in fp32.

    Returns:
        ``[num_tokens, 576]``: 512 latent values, 64 rotary values.

    Raises:
        ValueError: on a shape or dtype mismatch.
    """
    Dims("unpack_mla_rows").check(
        "rows", rows, ("num_tokens", layout.MLA_ROW_BYTES), (torch.uint8,)
    )
    # One copy makes every field aligned for its dtype, whatever the caller sliced.
    codes = rows[:, : layout.MLA_SCALE_OFFSET].contiguous().view(torch.float8_e4m3fn)
    scale = rows[:, layout.MLA_SCALE_OFFSET : layout.MLA_ROPE_OFFSET].contiguous()
    rope = rows[:, layout.MLA_ROPE_OFFSET :].contiguous().view(torch.bfloat16)
    out = torch.empty(rows.shape[0], layout.MLA_DIM, dtype=dtype, device=rows.device)
    groups = codes.float().unflatten(-1, (layout.MLA_NUM_SCALES, layout.MLA_GROUP))
    out[:, : layout.KV_LORA_RANK] = (groups * scale.view(torch.float32)[..., None]).flatten(1)
    out[:, layout.KV_LORA_RANK :] = rope
    return out
