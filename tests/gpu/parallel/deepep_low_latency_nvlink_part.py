"""DeepEP's low-latency mode on a machine without network cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu.parallel import deepep_low_latency_part

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks


def run(ranks: Ranks) -> None:
    """As the ordinary part, after the kernels' check for queue pairs of a card was satisfied."""
    deepep_low_latency_part.run(ranks, form="deepep_low_latency_nvlink", has_cards=False)
