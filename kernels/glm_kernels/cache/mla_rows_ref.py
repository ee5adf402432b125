"""Packed latent rows, one value at a time. Format: ``layout.py``."""

import torch


def pack_mla_rows_ref(latent: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Loop form of ``pack_mla_rows``.

    Args:
        latent: ``[num_tokens, 512]``, float.
        k_rope: ``[num_tokens, 64]``, float.

    Returns:
        ``[num_tokens, 656]``, uint8.
    """
    rows = torch.empty(latent.shape[0], 656, dtype=torch.uint8)
    for token in range(latent.shape[0]):
        for group in range(4):
            values = latent[token, group * 128 : (group + 1) * 128].float()  # [128]
            scale = values.abs().max() * (1.0 / 448.0)
            codes = torch.zeros(128, dtype=torch.float8_e4m3fn)
            if scale > 0:
                codes = (values * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            rows[token, group * 128 : (group + 1) * 128] = codes.view(torch.uint8)
            rows[token, 512 + 4 * group : 516 + 4 * group] = scale.reshape(1).view(torch.uint8)
        rows[token, 528:] = k_rope[token].to(torch.bfloat16).view(torch.uint8)
    return rows


def unpack_mla_rows_ref(rows: torch.Tensor) -> torch.Tensor:
    """Loop form of ``unpack_mla_rows`` in fp32.

    Args:
        rows: ``[num_tokens, 656]``, uint8.

    Returns:
        ``[num_tokens, 576]``, fp32.
    """
    out = torch.empty(rows.shape[0], 576)
    for token in range(rows.shape[0]):
        row = rows[token].contiguous()
        for group in range(4):
            codes = row[group * 128 : (group + 1) * 128].view(torch.float8_e4m3fn).float()
            scale = row[512 + 4 * group : 516 + 4 * group].clone().view(torch.float32)
            out[token, group * 128 : (group + 1) * 128] = codes * scale
        out[token, 512:] = row[528:].clone().view(torch.bfloat16).float()
    return out
