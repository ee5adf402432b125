"""When dividing the index scan over the ranks of an attention group saves time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_glm.planning import kv_cache
from sglang_glm.planning.hardware import COLLECTIVE_LATENCY_US
from sglang_glm.planning.traffic import index_scoring_flops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.hardware import Gpu

#: A candidate on the wire: fp32 score and int32 position.
CANDIDATE_BYTES = 8
_SCORE_BYTES, _SLOT_BYTES = 4, 4

#: Of a scan divided by history beyond a whole one: pack, gather, unpack, merge, look up. A planning figure.
_LAUNCHES, _LAUNCH_US = 6, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCosts:
    """What the parts of a scan take, in µs.

    Attributes:
        pair_us: Scoring one position for one row, and looking at the score once more to select.
        key_us: Reading one index key, once for all rows of a request.
        candidate_us: Looking at one candidate in the merge.
        collective_us: Start-up of an all-gather.
        gather_us: The same with what surrounds it where candidates are merged.
        byte_us: One byte that a rank receives.
    """

    pair_us: float
    key_us: float
    candidate_us: float
    collective_us: float
    gather_us: float
    byte_us: float

    def scan_us(self, scanned: Sequence[tuple[int, int]]) -> float:
        """Time of scoring and selecting on one rank.

        Args:
            scanned: Rows and cached length of each request.
        """
        pairs = sum(num_rows * length for num_rows, length in scanned)
        keys = sum(length for _, length in scanned)
        return pairs * self.pair_us + keys * self.key_us

    def saved_us(
        self, scanned: Sequence[tuple[int, int]], *, index_topk: int, world_size: int
    ) -> float:
        """Time that dividing the scans of one layer saves; negative where it costs.

        ::

            saved = (1 - 1/n) * scan - gather_us
                    - rows * index_topk * ((n - 1) * 8 * byte_us + n * candidate_us)

        Args:
            scanned: Rows and cached length of each request that selects; one all-gather serves all.
            index_topk: Candidates of a row and rank.
            world_size: Ranks, the formula's n.
        """
        candidates = index_topk * sum(num_rows for num_rows, _ in scanned)
        received = (world_size - 1) * CANDIDATE_BYTES * self.byte_us
        merge = candidates * (received + world_size * self.candidate_us)
        return (1 - 1 / world_size) * self.scan_us(scanned) - self.gather_us - merge

    def saved_by_request_us(
        self, scanned: Sequence[tuple[int, int]], *, index_topk: int, world_size: int
    ) -> float:
        """Time saved where each rank selects for `ceil(b / n)` of the b requests, in their order.

        ::

            saved = scan(all) - max(scan(a rank's)) - collective_us
                    - rows * index_topk * 4 * byte_us * (n - 1) / n

        Args:
            scanned: Rows and cached length of each request.
            index_topk: Selected positions of a row.
            world_size: Ranks, the formula's n.
        """
        count = -(-len(scanned) // world_size)
        parts = [scanned[first : first + count] for first in range(0, len(scanned), count)]
        rows = sum(num_rows for num_rows, _ in scanned)
        received = rows * index_topk * _SLOT_BYTES * (world_size - 1) / world_size
        gather = self.collective_us + received * self.byte_us
        return self.scan_us(scanned) - max(self.scan_us(part) for part in parts) - gather


def gpu_scan_costs(config: GlmDsaConfig, gpu: Gpu) -> ScanCosts:
    """Costs on a GPU: bytes over its memory and link, operations over its FP8 rate."""
    flops_us = 1e6 * index_scoring_flops(config, 1) / gpu.fp8_flops_per_s
    score_us = 1e6 * _SCORE_BYTES / gpu.hbm_bytes_per_s
    return ScanCosts(
        pair_us=flops_us + score_us,
        key_us=1e6 * kv_cache.index_key_bytes(config) / gpu.hbm_bytes_per_s,
        # Written by the gather, rearranged, and read.
        candidate_us=4e6 * CANDIDATE_BYTES / gpu.hbm_bytes_per_s,
        collective_us=COLLECTIVE_LATENCY_US,
        gather_us=COLLECTIVE_LATENCY_US + _LAUNCHES * _LAUNCH_US,
        byte_us=1e6 / gpu.link_bytes_per_s,
    )


CPU_SCAN_COSTS = ScanCosts(
    pair_us=0.3,
    key_us=0.02,
    candidate_us=0.1,
    collective_us=200.0,
    gather_us=300.0,
    byte_us=2e-3,
)
"""One core and gloo inside a machine, measured: FP32 scores of 32 heads, torch's top-k."""
