"""Shows the index's RoPE layout: scales its pairs so that no other pairs give the same scores.

A score does not change if both elements of a rotated pair are multiplied by a number in the keys
and divided by it in the queries. What a server computes that turns other pairs does change. As
trained, such a server keeps much of the selection, since all frequencies agree at distance zero;
scaled apart, the halves of a half-split pair drown it in their cross terms.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang_glm.checkpoint.spec import CheckpointSpec

RATIO = 64.0
"""Of the upper half of the rotated key elements to the lower half, in their norm's weights."""


def scale_pairs(tensors: dict[str, torch.Tensor], spec: CheckpointSpec) -> None:
    """Scale the pairs of every indexer, in place.

    Factors are powers of two, so that no weight and no score is rounded (e4m3 keys keep their
    significant bits), and only what the ratio lacks is applied: a second call changes nothing.

    Args:
        tensors: Checkpoint name to tensor, BF16.
        spec: Dimensions.
    """
    rope = spec.qk_rope_head_dim
    lower, upper = slice(0, rope // 2), slice(rope // 2, rope)
    for name, weight in tensors.items():
        if not name.endswith("indexer.k_norm.weight"):
            continue
        prefix = name.removesuffix("k_norm.weight")
        ratio = weight[upper].float().abs().mean() / weight[lower].float().abs().mean()
        factor = 2.0 ** round(math.log2(RATIO / ratio.item()) / 2)
        queries = tensors[f"{prefix}wq_b.weight"].view(spec.index_n_heads, spec.index_head_dim, -1)
        for half, by in ((lower, 1 / factor), (upper, factor)):
            weight[half] *= by
            tensors[f"{prefix}k_norm.bias"][half] *= by
            queries[:, half] /= by
