"""Whether counts may come from a distribution."""

from __future__ import annotations

import math

import torch


def chi_square_p(
    observed: torch.Tensor, expected: torch.Tensor, degrees: int | None = None
) -> float:
    """P of a chi-square at least as large, by the Wilson-Hilferty approximation."""
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    if degrees is None:
        degrees = int(used.sum()) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def goodness_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """P of counts at least as far from a distribution; 0 if something impossible occurred.

    Args:
        counts: `[classes]`, how often each class occurred.
        probs: `[classes]`. Classes expected fewer than 20 times are pooled.
    """
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = probs.double() * counts.sum()
    rare = expected < 20
    pooled = [torch.cat([x[~rare].double(), x[rare].sum()[None]]) for x in (counts, expected)]
    return chi_square_p(*pooled)
