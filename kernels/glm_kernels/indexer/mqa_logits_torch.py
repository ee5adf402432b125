"""Index scores as matrix products of bounded size; serves CPU traffic."""

import torch

# Bounds the [rows, heads, keys] product; larger blocks leave the cache of a host core.
BLOCK_BYTES = 32 << 20


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores of every row against every key, no windows.

    Args:
        q: ``[num_tokens, num_heads, 128]``, fp32.
        keys: ``[num_keys, 128]``, fp32.
        weights: ``[num_tokens, num_heads]``, fp32.

    Returns:
        ``[num_tokens, num_keys]``, fp32.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_keys = keys.shape[0]
    out = torch.empty(num_tokens, num_keys, device=q.device)
    key_block = min(max(num_keys, 1), 2048)
    row_block = max(1, BLOCK_BYTES // (4 * num_heads * key_block))
    for row in range(0, num_tokens, row_block):
        q_rows = q[row : row + row_block].reshape(-1, head_dim)  # [rows * heads, 128]
        w_rows = weights[row : row + row_block].unsqueeze(1)  # [rows, 1, heads]
        for key in range(0, num_keys, key_block):
            dots = (q_rows @ keys[key : key + key_block].T).relu_()
            dots = dots.view(-1, num_heads, dots.shape[-1])  # [rows, heads, keys]
            torch.bmm(w_rows, dots, out=out[row : row + row_block, None, key : key + key_block])
    return out


def mqa_logits_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Vectorised form of ``mqa_logits``; arguments as there."""
    keys = k.float()
    if k_scale is not None:
        keys = keys * k_scale[:, None]
    out = index_scores(q.float(), keys, weights.float())
    position = torch.arange(k.shape[0], device=q.device)
    outside = (position < cu_seqlen_ks[:, None]) | (position >= cu_seqlen_ke[:, None])
    return out.masked_fill_(outside, float("-inf"))
