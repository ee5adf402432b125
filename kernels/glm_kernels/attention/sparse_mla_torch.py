"""Attention over selected rows as a gather and two batched products; serves CPU traffic."""

import torch

from glm_kernels.cache.layout import KV_LORA_RANK, MLA_DIM
from glm_kernels.cache.mla_rows import unpack_mla_rows

# Temporaries of one chunk of tokens: the gathered rows (4 B x 576 x k each, and the packed form
# beside them) and the scores.
CHUNK_BYTES = 128 << 20


def sparse_mla_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectorised form of ``sparse_mla``; arguments as there.

    ``chunk_bytes`` bounds the temporaries, but a chunk has at least one token.
    """
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, KV_LORA_RANK, dtype=q.dtype, device=q.device)
    lse = torch.full((num_tokens, num_heads), float("-inf"), device=q.device)
    # Columns past the last valid one of the batch hold padding only; short contexts save most.
    used = (slots >= 0).any(0).nonzero()
    width = int(used[-1]) + 1 if used.numel() else 0
    if width == 0:
        return out, lse
    per_token = 4 * width * (2 * MLA_DIM + 2 * num_heads)
    step = max(1, chunk_bytes // per_token)
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        chosen = slots[part, :width]
        valid = chosen >= 0
        # Slot 0 may hold anything, NaN included: padded entries are zeroed after the gather.
        rows = kv_cache[chosen.clamp_min(0).long().flatten(), 0]
        rows = unpack_mla_rows(rows) if rows.dtype == torch.uint8 else rows.float()
        rows.masked_fill_(~valid.flatten()[:, None], 0.0)
        rows = rows.view(-1, width, MLA_DIM)
        scores = torch.bmm(q[part].float(), rows.transpose(1, 2)).mul_(softmax_scale)
        scores.masked_fill_(~valid[:, None], float("-inf"))
        norm = scores.logsumexp(-1)  # [tokens, heads]
        lse[part] = norm
        # A row without any valid slot would subtract -inf from -inf.
        weights = scores.sub_(norm.masked_fill(norm == float("-inf"), 0.0)[..., None]).exp_()
        out[part] = torch.bmm(weights, rows[..., :KV_LORA_RANK]).to(q.dtype)
    return out, lse
