"""How many experts a batch really touches, which decides the weight traffic of a decode step.

Real routing is skewed, so a measured histogram is better than the uniform assumption, and a
recorded number of experts hit is better than both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.layout import ParallelLayout


def expected_experts_hit(probabilities: Sequence[float], num_tokens: float) -> float:
    """Expected number of distinct experts that `num_tokens` independent tokens choose.

    Args:
        probabilities: `[num_experts]`, the probability that one token chooses each expert. They
            sum to the number of experts a token chooses.
        num_tokens: Tokens routed together, 0 or more.

    Returns:
        `sum(1 - (1 - p) ** num_tokens)`. Tokens of one text choose alike, so the real number is
        lower; the sum over independent tokens is an upper estimate.
    """
    return sum(1.0 - (1.0 - min(1.0, p)) ** num_tokens for p in probabilities)


class Routing(Protocol):
    """Load of the busiest GPU of one MoE layer."""

    def experts_hit_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int, num_tokens: float
    ) -> float:
        """Distinct local experts chosen by `num_tokens` tokens of the whole replica."""
        ...

    def token_share_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> float:
        """Share of all (token, expert) pairs that the GPU computes."""
        ...

    def describe(self) -> str:
        """The assumption, in words for the report."""
        ...


@dataclass(frozen=True, slots=True)
class UniformRouting:
    """Every expert is equally likely: the stated assumption when nothing was measured."""

    def experts_hit_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int, num_tokens: float
    ) -> float:
        """See `Routing`."""
        num_local = config.n_routed_experts // layout.ep_size
        probability = config.num_experts_per_tok / config.n_routed_experts
        return num_local * expected_experts_hit([probability], num_tokens)

    def token_share_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> float:
        """See `Routing`."""
        return 1.0 / layout.ep_size

    def describe(self) -> str:
        """See `Routing`."""
        return "assumed uniform over all experts (real routing hits fewer)"


@dataclass(frozen=True, slots=True)
class RecordedHits:
    """Experts hit per step, as recorded on a server: one number for every MoE layer."""

    experts_hit: float

    def experts_hit_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int, num_tokens: float
    ) -> float:
        """See `Routing`; spread evenly over the GPUs, at most the local experts."""
        num_local = config.n_routed_experts // layout.ep_size
        return min(num_local, self.experts_hit / layout.ep_size)

    def token_share_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> float:
        """See `Routing`."""
        return 1.0 / layout.ep_size

    def describe(self) -> str:
        """See `Routing`."""
        return f"recorded: {self.experts_hit:g} experts hit per MoE layer and step"


@dataclass(frozen=True, slots=True)
class RecordedHitsByLayer:
    """Experts hit per step, as recorded on a server for each MoE layer.

    Attributes:
        experts_hit: Layer id to number. Layers that were not recorded take the mean.
    """

    experts_hit: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.experts_hit:
            raise ValueError("plan: experts_hit names no layer, expected layer ids with numbers")

    def experts_hit_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int, num_tokens: float
    ) -> float:
        """See `Routing`; spread evenly over the GPUs, at most the local experts."""
        mean = sum(self.experts_hit.values()) / len(self.experts_hit)
        hit = self.experts_hit.get(layer_id, mean)
        return min(config.n_routed_experts // layout.ep_size, hit / layout.ep_size)

    def token_share_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> float:
        """See `Routing`."""
        return 1.0 / layout.ep_size

    def describe(self) -> str:
        """See `Routing`."""
        return f"recorded for {len(self.experts_hit)} MoE layers, step by step"


def _checked(values: object, layer: str, path: str | Path, config: GlmDsaConfig) -> tuple[int, ...]:
    if not (
        isinstance(values, list)
        and len(values) == config.n_routed_experts
        and all(isinstance(count, int) and count >= 0 for count in values)
        and sum(values) > 0
    ):
        raise ValueError(
            f"plan: expert counts of layer {layer} in {path} are not {config.n_routed_experts} "
            "non-negative numbers with a positive sum"
        )
    return tuple(values)


@dataclass(frozen=True, slots=True)
class MeasuredHistogram:
    """How often each expert was chosen, per layer.

    Attributes:
        counts: Layer id to `[n_routed_experts]` counts. Layers that were not recorded take the
            mean of the recorded ones.
    """

    counts: Mapping[int, tuple[int, ...]]

    @classmethod
    def from_json(cls, path: str | Path, config: GlmDsaConfig) -> MeasuredHistogram:
        """Read `{"layer_id": [count, …], …}`.

        Raises:
            ValueError: If it is no such file; names the layer whose counts do not fit the model.
        """
        wanted = 'expected JSON {"layer_id": [count per expert, …]}'
        if not Path(path).is_file():
            raise ValueError(f"plan: {path} is no file, {wanted}")
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"plan: {path} is not JSON, {wanted}") from None
        if not isinstance(raw, dict) or not raw or not all(key.isdecimal() for key in raw):
            raise ValueError(f"plan: {path} holds no layers, {wanted}")
        return cls({int(key): _checked(values, key, path, config) for key, values in raw.items()})

    def _probabilities(self, config: GlmDsaConfig, layer_id: int) -> list[float]:
        recorded = self.counts.get(layer_id)
        rows = [recorded] if recorded is not None else list(self.counts.values())
        sums = [0.0] * config.n_routed_experts
        for row in rows:
            scale = config.num_experts_per_tok / sum(row) / len(rows)
            sums = [total + count * scale for total, count in zip(sums, row)]
        return sums

    def _ranks(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> list[list[float]]:
        probabilities = self._probabilities(config, layer_id)
        num_local = config.n_routed_experts // layout.ep_size
        return [
            probabilities[rank * num_local : (rank + 1) * num_local]
            for rank in range(layout.ep_size)
        ]

    def experts_hit_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int, num_tokens: float
    ) -> float:
        """See `Routing`; the GPU that reads most, experts placed in order."""
        return max(
            expected_experts_hit(rank, num_tokens) for rank in self._ranks(config, layout, layer_id)
        )

    def token_share_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> float:
        """See `Routing`; the GPU that computes most, experts placed in order."""
        busiest = max(sum(rank) for rank in self._ranks(config, layout, layer_id))
        return busiest / config.num_experts_per_tok

    def describe(self) -> str:
        """See `Routing`."""
        return f"measured histogram of {len(self.counts)} layers, tokens taken as independent"
