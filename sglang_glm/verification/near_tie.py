"""Index scores, and the proof that a selection was decided by rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NEAR_TIE_BOUND = 8 * 2.0**-24
"""Gap between the k-th and (k+1)-th score, relative to the sum of magnitudes behind them, at or
below which two correct FP32 implementations may choose differently."""


def head_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Per-head terms of the index score.

    ``terms[t, h, s] = w[t, h] * relu(q[t, h] . k[s] / sqrt(index_head_dim))``

    Args:
        q: ``[rows, heads, index_head_dim]``, after RoPE.
        k: ``[keys, index_head_dim]``, after LayerNorm and RoPE.
        weights: ``[rows, heads]``, already multiplied by ``heads ** -0.5``.

    Returns:
        ``[rows, heads, keys]``; their sum over heads is the score.
    """
    dots = torch.einsum("thd,sd->ths", q.float(), k.float()) * q.shape[-1] ** -0.5
    return weights.float()[:, :, None] * torch.relu(dots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one indexer chose for a run of rows.

    Attributes:
        positions: ``[rows, topk]``, int32, ascending, -1 at the tail.
        relative_gap: ``[rows]``, FP32. ``(s_k - s_{k+1}) / magnitude``; infinite where everything
            visible was selected.
    """

    positions: torch.Tensor
    relative_gap: torch.Tensor


def select_positions(terms: torch.Tensor, topk: int, first_position: int) -> Selection:
    """Select the best visible positions: score descending, position ascending.

    Args:
        terms: ``[rows, heads, keys]``, from :func:`head_scores`.
        topk: Positions kept a row.
        first_position: Position of row 0; row ``t`` sees positions ``0 .. first_position + t``.

    Returns:
        The selection. The gap's magnitude is the larger of the sums over heads of ``|terms|`` at
        the k-th and the (k+1)-th position.
    """
    rows, _, keys = terms.shape
    scores = terms.sum(1)  # [rows, keys]
    visible = torch.arange(keys, device=terms.device)[None, :] <= (
        first_position + torch.arange(rows, device=terms.device)[:, None]
    )
    scores = scores.masked_fill(~visible, float("-inf"))
    # stable, so that equal scores keep ascending positions
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    kept = min(topk, keys)
    chosen = order[:, :kept].masked_fill(values[:, :kept] == float("-inf"), keys)
    chosen = chosen.sort(-1).values
    positions = torch.full((rows, topk), -1, dtype=torch.int32, device=terms.device)
    positions[:, :kept] = torch.where(chosen == keys, -1, chosen).to(torch.int32)

    gap = torch.full((rows,), float("inf"), device=terms.device)
    if keys > topk:
        contested = values[:, topk] > float("-inf")
        border = order[:, topk - 1 : topk + 1]  # [rows, 2]
        at_border = terms.gather(2, border[:, None, :].expand(-1, terms.shape[1], -1))
        magnitude = at_border.abs().sum(1).amax(-1)
        difference = values[:, topk - 1] - values[:, topk]
        # Exact zeros on both sides are a tie although the magnitude is zero too.
        relative = torch.where(difference == 0, 0.0, difference / magnitude)
        gap = torch.where(contested, relative, gap)
    return Selection(positions=positions, relative_gap=gap)


def first_near_tie(relative_gap: torch.Tensor, bound: float = NEAR_TIE_BOUND) -> int | None:
    """First row whose selection rounding may decide.

    Args:
        relative_gap: ``[rows]``, the smallest over the model's full layers.
        bound: Largest gap that counts as a near-tie.

    Returns:
        The row's position, or None if there is none. What row ``p`` and later rows predict may
        legitimately differ; what earlier rows predict may not.
    """
    rows = (relative_gap <= bound).nonzero()
    return int(rows[0]) if len(rows) else None
