"""Index pages: quantise, store and load index keys."""

import torch

from glm_kernels._checks import FLOAT_DTYPES, INT_DTYPES, Dims
from glm_kernels.cache import layout


def quantize_index_k(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise index vectors to e4m3 with one power-of-two scale each.

    ::

        scale = 2 ** ceil(log2(max(amax(|k|), 1e-4) * fp32(1 / 448)))
        codes = e4m3(clamp(k / scale, -448, 448))

    Args:
        k: ``[num_tokens, 128]``, float. Index keys, or index queries of one head.

    Returns:
        ``[num_tokens, 128]`` e4m3 codes and ``[num_tokens]`` fp32 scales, each a power of two.
        Value = code * scale.

    Raises:
        ValueError: on a shape or dtype mismatch.

    Notes:
        The exponent is read from the bits, so a ratio that is a power of two already is not rounded
        up by the error of a logarithm.
    """
    Dims("quantize_index_k").check("k", k, ("num_tokens", layout.INDEX_HEAD_DIM), FLOAT_DTYPES)
    values = k.float()
    ratio = values.abs().amax(-1).clamp_min(layout.INDEX_AMAX_FLOOR) * layout.FP8_MAX_INVERSE
    bits = ratio.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    scale = (exponent << 23).view(torch.float32)
    codes = (values / scale[:, None]).clamp(-layout.FP8_MAX, layout.FP8_MAX)
    return codes.to(torch.float8_e4m3fn), scale


def _views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writable views of a page buffer: codes ``[P, 64, 128]`` uint8 and scales ``[P, 64]`` fp32."""
    codes = pages[:, : layout.INDEX_SCALE_OFFSET].unflatten(
        1, (layout.PAGE_SIZE, layout.INDEX_HEAD_DIM)
    )
    return codes, pages[:, layout.INDEX_SCALE_OFFSET :].view(torch.float32)


def store_index_k(pages: torch.Tensor, slot_mapping: torch.Tensor, k: torch.Tensor) -> None:
    """Quantise index keys and write them to their slots, in place.

    Args:
        pages: ``[num_pages, 8448]``, uint8. Index cache of one layer; written in place.
        slot_mapping: ``[num_tokens]``, int32 or int64. Slot of each key; negative slots are
            skipped.
        k: ``[num_tokens, 128]``, float.

    Raises:
        ValueError: on a shape, dtype or device mismatch.

    Notes:
        Where one slot appears twice, one of its keys is stored whole; which one is unspecified.
    """
    dims = Dims("store_index_k")
    dims.check("pages", pages, ("num_pages", layout.INDEX_PAGE_BYTES), (torch.uint8,))
    dims.check("slot_mapping", slot_mapping, ("num_tokens",), INT_DTYPES)
    dims.check("k", k, ("num_tokens", layout.INDEX_HEAD_DIM), FLOAT_DTYPES)
    if dims["num_tokens"] == 0:
        return
    keep = slot_mapping >= 0
    slots, codes_scale = slot_mapping[keep].long(), quantize_index_k(k[keep])
    page_codes, page_scales = _views(pages)
    page, row = slots // layout.PAGE_SIZE, slots % layout.PAGE_SIZE
    page_codes[page, row] = codes_scale[0].view(torch.uint8)
    page_scales[page, row] = codes_scale[1]


def load_index_k_fp8(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather index keys as stored.

    Args:
        pages: ``[num_pages, 8448]``, uint8.
        slots: ``[num_tokens]``, int32 or int64, each a valid slot.

    Returns:
        ``[num_tokens, 128]`` e4m3 codes and ``[num_tokens]`` fp32 scales; value = code * scale.

    Raises:
        ValueError: on a shape, dtype or device mismatch.
    """
    dims = Dims("load_index_k")
    dims.check("pages", pages, ("num_pages", layout.INDEX_PAGE_BYTES), (torch.uint8,))
    dims.check("slots", slots, ("num_tokens",), INT_DTYPES)
    page_codes, page_scales = _views(pages)
    page, row = slots.long() // layout.PAGE_SIZE, slots.long() % layout.PAGE_SIZE
    return page_codes[page, row].view(torch.float8_e4m3fn), page_scales[page, row]


def load_index_k(
    pages: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Gather index keys and dequantise them.

    Args:
        pages: ``[num_pages, 8448]``, uint8.
        slots: ``[num_tokens]``, int32 or int64, each a valid slot.
        dtype: dtype of the result; the product is formed in fp32.

    Returns:
        ``[num_tokens, 128]``.

    Raises:
        ValueError: on a shape, dtype or device mismatch.
    """
    codes, scale = load_index_k_fp8(pages, slots)
    return (codes.float() * scale[:, None]).to(dtype)
