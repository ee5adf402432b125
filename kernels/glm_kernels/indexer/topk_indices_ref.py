"""Exact top-k by a stable sort of Python tuples."""

import torch


def topk_indices_ref(
    logits: torch.Tensor,
    k: int,
    cu_seqlen_ks: torch.Tensor | None = None,
    cu_seqlen_ke: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loop form of ``topk_indices`` without the map to slots.

    Args:
        logits: ``[num_tokens, width]``, float.
        k: entries a row.
        cu_seqlen_ks: ``[num_tokens]``, int, or None for 0.
        cu_seqlen_ke: ``[num_tokens]``, int, or None for ``width``.

    Returns:
        ``[num_tokens, k]``, int32, relative to the window's start, -1 at the tail.
    """
    num_tokens, width = logits.shape
    out = torch.full((num_tokens, k), -1, dtype=torch.int32)
    for row in range(num_tokens):
        start = 0 if cu_seqlen_ks is None else int(cu_seqlen_ks[row])
        end = width if cu_seqlen_ke is None else int(cu_seqlen_ke[row])
        values = logits[row].tolist()
        window = [
            (position, values[position]) for position in range(max(start, 0), min(end, width))
        ]
        # Both NaN and -inf fail this comparison.
        window = [(position, score) for position, score in window if score > float("-inf")]
        window.sort(key=lambda item: -item[1])  # stable: equal scores keep position order
        for rank, (position, _) in enumerate(window[:k]):
            out[row, rank] = position - start
    return out
