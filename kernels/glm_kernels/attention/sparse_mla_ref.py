"""Attention over selected latent rows, one token and one head at a time."""

import torch

from glm_kernels.cache.mla_rows_ref import unpack_mla_rows_ref


def sparse_mla_ref(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loop form of ``sparse_mla``.

    Args:
        q: ``[num_tokens, num_heads, 576]``, float.
        kv_cache: ``[num_slots, 1, 576]`` float or ``[num_slots, 1, 656]`` uint8.
        slots: ``[num_tokens, k]``, int32, -1 for none.
        softmax_scale: factor of the dot products.
        dtype: dtype of all arithmetic and of the results.

    Returns:
        ``[num_tokens, num_heads, 512]`` and the natural ``lse`` ``[num_tokens, num_heads]``.
    """
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, 512, dtype=dtype, device=q.device)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=dtype, device=q.device)
    for token in range(num_tokens):
        chosen = slots[token][slots[token] >= 0].long()
        if chosen.numel() == 0:
            continue
        rows = kv_cache[chosen, 0]
        if kv_cache.dtype == torch.uint8:
            rows = unpack_mla_rows_ref(rows.cpu()).to(q.device)
        rows = rows.to(dtype)  # [num_chosen, 576]
        for head in range(num_heads):
            scores = rows @ q[token, head].to(dtype) * softmax_scale  # [num_chosen]
            lse[token, head] = scores.logsumexp(0)
            out[token, head] = scores.softmax(0) @ rows[:, :512]
    return out, lse
