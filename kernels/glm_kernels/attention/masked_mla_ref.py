"""Masked attention, one row and one head at a time."""

import torch


def masked_mla_ref(
    q: torch.Tensor,
    latents: torch.Tensor,
    row_lengths: torch.Tensor,
    softmax_scale: float,
    topk_positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loop form of ``masked_mla``.

    Args:
        q: ``[num_rows, num_heads, 576]``, float.
        latents: ``[context, 576]``, float.
        row_lengths: ``[num_rows]``, int.
        softmax_scale: factor of the dot products.
        topk_positions: ``[num_rows, k]``, int32, -1 for none; None selects all.
        dtype: dtype of all arithmetic and of the results.

    Returns:
        ``[num_rows, num_heads, 512]`` and the natural ``lse`` ``[num_rows, num_heads]``.
    """
    num_rows, num_heads, _ = q.shape
    out = torch.zeros(num_rows, num_heads, 512, dtype=dtype)
    lse = torch.full((num_rows, num_heads), float("-inf"), dtype=dtype)
    for row in range(num_rows):
        visible = set(range(int(row_lengths[row])))
        if topk_positions is not None:
            visible &= set(topk_positions[row].tolist())
        chosen = latents[sorted(visible)].to(dtype)  # [num_visible, 576]
        if not visible:
            continue
        for head in range(num_heads):
            scores = chosen @ q[row, head].to(dtype) * softmax_scale  # [num_visible]
            lse[row, head] = scores.logsumexp(0)
            out[row, head] = scores.softmax(0) @ chosen[:, :512]
    return out, lse
