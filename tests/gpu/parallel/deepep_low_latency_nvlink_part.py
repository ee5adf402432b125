"""DeepEP's low-latency mode on a machine without network cards, where it did not run as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu.parallel import deepep_low_latency_part

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks


def run(ranks: Ranks) -> None:
    """As the ordinary part, with kernels that were told to wait for no card."""
    deepep_low_latency_part.run(ranks, form="deepep_low_latency_nvlink", has_cards=False)
