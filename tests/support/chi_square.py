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


def homogeneity_p(counts: torch.Tensor) -> float:
    """P that two samples of one distribution differ at least as much.

    Args:
        counts: `[2, classes]`, how often each sample had each class. Classes with fewer than 20 in
            all are pooled.
    """
    counts = counts.double()
    rare = counts.sum(0) < 20
    counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], 1)
    expected = counts.sum(0, keepdim=True) * counts.sum(1, keepdim=True) / counts.sum()
    degrees = int((expected[0] > 0).sum()) - 1
    return chi_square_p(counts.flatten(), expected.flatten(), degrees)
