"""Latent writes, one token at a time."""

import torch

from glm_kernels.cache.mla_rows_ref import pack_mla_rows_ref


def store_mla_kv_ref(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor
) -> None:
    """Loop form of ``store_mla_kv``, in place.

    Args:
        kv_cache: ``[num_slots, 1, 576]`` float or ``[num_slots, 1, 656]`` uint8.
        slot_mapping: ``[num_tokens]``, integer; negative slots are skipped.
        latent: ``[num_tokens, 512]``, float.
        k_rope: ``[num_tokens, 64]``, float.
    """
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        if kv_cache.dtype == torch.uint8:
            row = pack_mla_rows_ref(latent[token : token + 1], k_rope[token : token + 1])[0]
            kv_cache[slot, 0] = row
        else:
            kv_cache[slot, 0, :512] = latent[token].to(kv_cache.dtype)
            kv_cache[slot, 0, 512:] = k_rope[token].to(kv_cache.dtype)
