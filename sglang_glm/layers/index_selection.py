"""Selection over scored histories, alone or divided over the ranks that share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from glm_kernels.indexer.topk_indices import topk_indices
from sglang.srt.runtime_context import get_parallel

from sglang_glm import envs
from sglang_glm.parallel.index_scan import (
    Candidates,
    gather_candidates,
    history_share,
    local_candidates,
    merge_candidates,
)
from sglang_glm.planning.index_scan import CPU_SCAN_COSTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_glm.attention.metadata import RequestRows

    Score = Callable[[RequestRows, range], torch.Tensor]


def select(
    requests: Sequence[RequestRows], score: Score, index_topk: int
) -> Sequence[torch.Tensor]:
    """Select the best positions of each request's rows.

    Args:
        requests: Requests longer than `index_topk`, the same on every rank of an attention group.
        score: From a request and a range of its positions to `[num_rows, len(range)]` fp32 scores,
            -inf where a row does not see the position.
        index_topk: Positions to select.

    Returns:
        For each request `[num_rows, index_topk]` int32, best first. With several ranks and enough
        to score, each rank scores a part of every history and all return the same.
    """
    group = get_parallel().attn_tp_group
    if not requests or not is_divided(requests, index_topk, group.world_size):
        return [
            topk_indices(score(request, range(request.cache_seqlen)), index_topk)
            for request in requests
        ]
    own = []
    for request in requests:
        share = history_share(request.cache_seqlen, group.rank_in_group, group.world_size)
        own.append(
            local_candidates(score(request, share), request.row_lengths(), share.start, index_topk)
        )
    gathered = gather_candidates(
        Candidates(
            scores=torch.cat([candidates.scores for candidates in own]),
            positions=torch.cat([candidates.positions for candidates in own]),
        ),
        group.device_group,
    )
    selected = merge_candidates(gathered, index_topk)
    return selected.split([request.num_rows for request in requests])


def is_divided(requests: Sequence[RequestRows], index_topk: int, world_size: int) -> bool:
    """Whether ranks divide these scans: each of them must come to the same answer.

    Args:
        requests: What this layer has to score.
        index_topk: Positions to select.
        world_size: Ranks of the attention group.
    """
    choice = envs.DIVIDE_INDEX_SCAN.get()
    if world_size == 1 or choice == "off":
        return False
    if choice == "on":
        return True
    scanned = [(request.num_rows, request.cache_seqlen) for request in requests]
    return CPU_SCAN_COSTS.saved_us(scanned, index_topk=index_topk, world_size=world_size) > 0
