"""Write new latent rows into a layer's cache."""

import torch

from glm_kernels._checks import FLOAT_DTYPES, INT_DTYPES, Dims
from glm_kernels.cache import layout
from glm_kernels.cache.mla_rows import pack_mla_rows


def check_kv_cache(dims: Dims, kv_cache: torch.Tensor) -> None:
    """Raise unless ``kv_cache`` is ``[slots, 1, 576]`` float or ``[slots, 1, 656]`` uint8."""
    if kv_cache.dtype == torch.uint8:
        dims.check("kv_cache", kv_cache, ("num_slots", 1, layout.MLA_ROW_BYTES), (torch.uint8,))
    else:
        dims.check("kv_cache", kv_cache, ("num_slots", 1, layout.MLA_DIM), FLOAT_DTYPES)


def store_mla_kv(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor
) -> None:
    """Write latents and rotary keys to their slots, in place.

    Args:
        kv_cache: ``[num_slots, 1, 576]`` float, or ``[num_slots, 1, 656]`` uint8 for packed rows.
        slot_mapping: ``[num_tokens]``, int32 or int64. Negative slots are skipped.
        latent: ``[num_tokens, 512]``, float.
        k_rope: ``[num_tokens, 64]``, float.

    Raises:
        ValueError: on a shape, dtype or device mismatch.

    Notes:
        Where one slot appears twice, one of its rows is stored; which one is unspecified.
    """
    dims = Dims("store_mla_kv")
    check_kv_cache(dims, kv_cache)
    dims.check("slot_mapping", slot_mapping, ("num_tokens",), INT_DTYPES)
    dims.check("latent", latent, ("num_tokens", layout.KV_LORA_RANK), FLOAT_DTYPES)
    dims.check("k_rope", k_rope, ("num_tokens", layout.QK_ROPE_HEAD_DIM), FLOAT_DTYPES)
    if dims["num_tokens"] == 0:
        return
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    if kv_cache.dtype == torch.uint8:
        kv_cache[slots, 0] = pack_mla_rows(latent[keep], k_rope[keep])
    else:
        kv_cache[slots, 0] = torch.cat([latent[keep], k_rope[keep]], dim=-1).to(kv_cache.dtype)
