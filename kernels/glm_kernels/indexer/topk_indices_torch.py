"""Exact top-k from ``torch.topk``'s threshold, its ties completed by position."""

import torch

# Below this width one stable sort is quicker than finding the threshold first.
SORT_WIDTH = 512


def _visible(
    logits: torch.Tensor, cu_seqlen_ks: torch.Tensor | None, cu_seqlen_ke: torch.Tensor | None
) -> torch.Tensor:
    """Copy of the logits with NaN and everything outside the window at ``-inf``."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    hidden = scores.isnan()
    if cu_seqlen_ks is not None or cu_seqlen_ke is not None:
        position = torch.arange(logits.shape[1], device=logits.device)
        if cu_seqlen_ks is not None:
            hidden |= position < cu_seqlen_ks[:, None]
        if cu_seqlen_ke is not None:
            hidden |= position >= cu_seqlen_ke[:, None]
    return scores.masked_fill(hidden, float("-inf"))


def _complete_ties(scores: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
    """Replace the entries at each row's threshold by the lowest positions of that score, in place.

    Args:
        scores: ``[num_tokens, width]``, no NaN.
        values: ``[num_tokens, k]``, the k largest, descending.
        positions: ``[num_tokens, k]``, int64, their positions; which of the tied ones is arbitrary.
    """
    threshold = values[:, -1:]
    needed = (values == threshold).sum(1)
    tied = scores == threshold
    ambiguous = ((tied.sum(1) > needed) & (threshold[:, 0] > float("-inf"))).nonzero()[:, 0]
    if ambiguous.numel() == 0:
        return
    row, position = tied[ambiguous].nonzero(as_tuple=True)  # ascending position within a row
    counts = torch.bincount(row, minlength=ambiguous.numel())
    rank = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    keep = rank < needed[ambiguous][row]
    first = positions.shape[1] - needed[ambiguous]  # the ties fill the end of the descending list
    target = ambiguous[row[keep]], first[row[keep]] + rank[keep]
    positions[target] = position[keep]


def topk_indices_torch(
    logits: torch.Tensor,
    k: int,
    cu_seqlen_ks: torch.Tensor | None = None,
    cu_seqlen_ke: torch.Tensor | None = None,
) -> torch.Tensor:
    """Vectorised form of ``topk_indices`` without the map to slots; arguments as there."""
    num_tokens, width = logits.shape
    out = torch.full((num_tokens, k), -1, dtype=torch.int32, device=logits.device)
    taken = min(k, width)
    if taken == 0 or num_tokens == 0:
        return out
    scores = _visible(logits, cu_seqlen_ks, cu_seqlen_ke)
    if width <= SORT_WIDTH:
        values, positions = scores.sort(dim=1, descending=True, stable=True)
        values, positions = values[:, :taken], positions[:, :taken]
    else:
        values, positions = scores.topk(taken, dim=1)
        _complete_ties(scores, values, positions)
        positions = positions.sort(dim=1).values
        values, order = scores.gather(1, positions).sort(dim=1, descending=True, stable=True)
        positions = positions.gather(1, order)
    if cu_seqlen_ks is not None:
        positions = positions - cu_seqlen_ks[:, None]
    out[:, :taken] = positions.masked_fill(values == float("-inf"), -1)
    return out
