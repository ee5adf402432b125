"""Experts hit as SGLang counted them on a running server, pass by pass.

The server is started with `--expert-distribution-recorder-mode stat` and
`--expert-distribution-recorder-buffer-size -1`; POST `/start_expert_distribution_record`, then
traffic, `/stop_…` and `/dump_expert_distribution_record` leave one `.pt` file in
`SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR`. It counts the target's passes, not the MTP layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """One forward pass of the target over all attention groups.

    Attributes:
        rows: Tokens that were routed.
        counts: MoE layer id to `[n_routed_experts]`, how many rows chose each expert.
    """

    rows: int
    counts: dict[int, tuple[int, ...]]

    def experts_hit(self, layer_id: int, ep_size: int = 1) -> int:
        """Distinct experts of a layer on the GPU that reads most, experts placed in order."""
        counts = self.counts[layer_id]
        num_local = len(counts) // ep_size
        return max(
            sum(count > 0 for count in counts[start : start + num_local])
            for start in range(0, len(counts), num_local)
        )


def parse_passes(
    counts: Iterable[Sequence[Sequence[int]]], pairs_per_token: int
) -> list[RecordedPass]:
    """Turn SGLang's counts into passes.

    Args:
        counts: `[num_passes, num_layers, n_routed_experts]`. Passes without any count are those of
            the draft model and are left out; layers without any are dense.
        pairs_per_token: What one token adds to a layer: `num_experts_per_tok`, times the ranks
            that all counted it.

    Returns:
        The passes in their order.

    Raises:
        ValueError: If the layers of a pass routed different numbers of tokens.
    """
    passes = []
    for index, layers in enumerate(counts):
        by_layer = {
            layer: tuple(int(count) for count in layer_counts)
            for layer, layer_counts in enumerate(layers)
            if any(layer_counts)
        }
        chosen = {sum(layer_counts) for layer_counts in by_layer.values()}
        if len(chosen) > 1:
            raise ValueError(
                f"plan: pass {index} of the expert record routed {min(chosen)} to {max(chosen)} "
                "(token, expert) pairs, expected the same number in every layer; record again, and "
                "stop the record only when no request is running"
            )
        if by_layer:
            passes.append(RecordedPass(chosen.pop() // pairs_per_token, by_layer))
    return passes


def read_passes(
    path: str | Path, config: GlmDsaConfig, layout: ParallelLayout
) -> list[RecordedPass]:
    """Read the file that SGLang's recorder leaves in mode `stat`.

    Args:
        path: The file.
        config: The model that was served.
        layout: Of that server. SGLang sums the counts of all ranks; without an all-to-all each of
            them counted every token.

    Raises:
        ValueError: If it is not such a file, is of another model, or holds no pass.
    """
    import pickle

    import torch

    if not Path(path).is_file():
        raise ValueError(f"plan: {path} is no file, expected a record of SGLang's expert recorder")
    try:
        counts = torch.load(path, map_location="cpu", weights_only=True)["logical_count"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"plan: {path} is no record of SGLang's expert recorder ({type(error).__name__}); write "
            "one with --expert-distribution-recorder-mode stat"
        ) from None
    expected = [config.num_hidden_layers, config.n_routed_experts]
    if list(counts.shape[1:]) != expected:
        raise ValueError(
            f"plan: {path} counts {list(counts.shape[1:])} layers and experts, expected {expected} "
            "as in the model's config"
        )
    copies = layout.tp_size if layout.moe_dispatch == "none" else 1
    passes = parse_passes(counts.tolist(), copies * config.num_experts_per_tok)
    if not passes:
        raise ValueError(f"plan: {path} holds no pass; send requests between start and stop")
    return passes


def mean_experts_hit(passes: Sequence[RecordedPass], rows: int) -> dict[int, float]:
    """Distinct experts hit in passes of one size.

    Args:
        passes: Recorded.
        rows: Tokens of the passes that count.

    Returns:
        MoE layer id to the mean; empty when no pass has that size.
    """
    same = [item for item in passes if item.rows == rows]
    layers = same[0].counts if same else {}
    return {layer: fmean(item.experts_hit(layer) for item in same) for layer in layers}


@dataclass(frozen=True, slots=True)
class RecordedPasses:
    """The routing of recorded passes: each step takes the passes nearest to it in size.

    Attributes:
        passes: At least one.
    """

    passes: tuple[RecordedPass, ...]

    def _nearest(self, num_tokens: float) -> list[RecordedPass]:
        rows = min((item.rows for item in self.passes), key=lambda rows: abs(rows - num_tokens))
        return [item for item in self.passes if item.rows == rows]

    def experts_hit_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int, num_tokens: float
    ) -> float:
        """See `Routing`; the GPU that reads most. The MTP layer takes the mean of the others."""
        nearest = self._nearest(num_tokens)
        layers = [layer_id] if layer_id in nearest[0].counts else list(nearest[0].counts)
        return fmean(
            item.experts_hit(layer, layout.ep_size) for item in nearest for layer in layers
        )

    def token_share_per_gpu(
        self, config: GlmDsaConfig, layout: ParallelLayout, layer_id: int
    ) -> float:
        """See `Routing`; of all passes, the GPU that computes most, experts placed in order."""
        num_local = config.n_routed_experts // layout.ep_size
        sums = [0] * layout.ep_size
        for item in self.passes:
            for layer, counts in item.counts.items():
                if layer == layer_id or layer_id not in item.counts:
                    for rank in range(layout.ep_size):
                        sums[rank] += sum(counts[rank * num_local : (rank + 1) * num_local])
        return max(sums) / sum(sums)

    def describe(self) -> str:
        """See `Routing`."""
        rows = [item.rows for item in self.passes]
        return (
            f"recorded on a server: {len(rows)} passes of {min(rows):,} to {max(rows):,} rows, "
            f"{len(self.passes[0].counts)} MoE layers"
        )
