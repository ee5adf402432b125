"""Index pages, one key at a time. Format: ``layout.py``."""

import math

import torch


def quantize_index_k_ref(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loop form of ``quantize_index_k``.

    Args:
        k: ``[num_tokens, 128]``, float.

    Returns:
        ``[num_tokens, 128]`` e4m3 codes and ``[num_tokens]`` fp32 scales.
    """
    codes = torch.empty(k.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(k.shape[0])
    for token in range(k.shape[0]):
        row = k[token].float()
        ratio = row.abs().max().clamp_min(1e-4) * (1.0 / 448.0)
        mantissa, exponent = math.frexp(ratio.item())
        # frexp's mantissa lies in [0.5, 1): only 0.5 is a power of two already.
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        codes[token] = (row / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        scales[token] = scale
    return codes, scales


def store_index_k_ref(pages: torch.Tensor, slot_mapping: torch.Tensor, k: torch.Tensor) -> None:
    """Loop form of ``store_index_k``: byte by byte at the documented offsets, in place.

    Args:
        pages: ``[num_pages, 8448]``, uint8.
        slot_mapping: ``[num_tokens]``, integer; negative slots are skipped.
        k: ``[num_tokens, 128]``, float.
    """
    codes, scales = quantize_index_k_ref(k)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, row = slot // 64, slot % 64
        pages[page, row * 128 : (row + 1) * 128] = codes[token].view(torch.uint8)
        pages[page, 8192 + 4 * row : 8196 + 4 * row] = scales[token].reshape(1).view(torch.uint8)


def load_index_k_ref(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Loop form of ``load_index_k`` in fp32.

    Args:
        pages: ``[num_pages, 8448]``, uint8.
        slots: ``[num_tokens]``, integer, all valid.

    Returns:
        ``[num_tokens, 128]``, fp32.
    """
    out = torch.empty(slots.shape[0], 128)
    for token, slot in enumerate(slots.tolist()):
        page, row = slot // 64, slot % 64
        codes = pages[page, row * 128 : (row + 1) * 128].clone().view(torch.float8_e4m3fn)
        scale = pages[page, 8192 + 4 * row : 8196 + 4 * row].clone().view(torch.float32)
        out[token] = codes.float() * scale
    return out
