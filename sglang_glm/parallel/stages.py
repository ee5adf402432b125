"""Pipeline stages: which layers each holds, and what crosses a cut."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig

PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"


def stage_layers(num_layers: int, pp_size: int, partition: str | None = None) -> tuple[range, ...]:
    """Layers of each stage, as SGLang divides them.

    Args:
        num_layers: Decoder layers; the MTP layer is the last stage's besides.
        pp_size: Stages (`--pp-size`).
        partition: `SGLANG_PP_LAYER_PARTITION`, comma-separated layers of each stage; None divides
            evenly, the last stages taking one more.

    Raises:
        ValueError: a stage would be empty, or the partition does not add up; says what to set.
    """
    if pp_size > num_layers:
        raise ValueError(
            f"--pp-size {pp_size} with {num_layers} layers: expected at most a stage a layer"
        )
    if partition is None or pp_size == 1:
        least, larger = divmod(num_layers, pp_size)
        sizes = [least + (stage >= pp_size - larger) for stage in range(pp_size)]
    else:
        try:
            sizes = [int(size) for size in partition.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != pp_size or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"{PARTITION_VARIABLE}={partition}: expected {pp_size} positive numbers (--pp-size) "
                f"that add up to {num_layers} layers"
            )
    bounds = [0, *itertools.accumulate(sizes)]
    return tuple(range(first, last) for first, last in itertools.pairwise(bounds))


def carries_selection(config: GlmDsaConfig, first_layer: int) -> bool:
    """Whether a stage that starts at `first_layer` needs the selection of the stage before it.

    A shared index layer attends to what the last full layer selected, which may be on another
    rank: then `[num_rows, index_topk]` int32 positions travel beside the hidden states.
    """
    return first_layer > 0 and not config.has_indexer(first_layer)
