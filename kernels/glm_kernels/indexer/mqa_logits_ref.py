"""Ragged index scores, one head and one query at a time."""

import torch


def mqa_logits_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Loop form of ``mqa_logits``.

    Args:
        q: ``[num_tokens, num_heads, 128]``, any float or e4m3.
        k: ``[num_keys, 128]``, same.
        weights: ``[num_tokens, num_heads]``, float.
        cu_seqlen_ks: ``[num_tokens]``, int. First visible key of a row.
        cu_seqlen_ke: ``[num_tokens]``, int. End of a row's visible keys.
        k_scale: ``[num_keys]``, fp32, or None.
        dtype: dtype of all arithmetic and of the result; fp64 makes the reference of the tests.

    Returns:
        ``[num_tokens, num_keys]``, ``-inf`` outside each row's window.
    """
    keys = k.to(dtype)
    if k_scale is not None:
        keys = keys * k_scale.to(dtype)[:, None]  # [num_keys, 128]
    out = torch.full((q.shape[0], k.shape[0]), float("-inf"), dtype=dtype, device=q.device)
    for row in range(q.shape[0]):
        start, end = int(cu_seqlen_ks[row]), int(cu_seqlen_ke[row])
        if start >= end:
            continue
        score = torch.zeros(end - start, dtype=dtype, device=q.device)
        for head in range(q.shape[1]):
            dot = keys[start:end] @ q[row, head].to(dtype)  # [end - start]
            score += weights[row, head].to(dtype) * dot.clamp_min(0)
        out[row, start:end] = score
    return out
