"""Whether counts may come from a distribution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
