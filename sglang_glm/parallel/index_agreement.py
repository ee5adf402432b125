"""Ranks that share a request select the same positions for it: asked for, or proved.

Each rank scores the whole history with replicated weights and one rule for ties, so that they agree
without talking. Where they did not, each would attend to other positions for its own heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sglang.srt.environ import envs as sglang_envs
from sglang.srt.runtime_context import get_parallel

from sglang_glm import envs


def settle_selection(selected: torch.Tensor, layer_id: int) -> torch.Tensor:
    """Apply SGLang's `SGLANG_DSA_TOPK_BROADCAST` and our `SGLANG_GLM_CHECK_INDEX_AGREEMENT`.

    Args:
        selected: `[num_rows, index_topk]` int32, the same rows on every rank of the attention group.
        layer_id: For the message.

    Returns:
        The selection to use; that of the group's first rank under the broadcast.

    Raises:
        RuntimeError: the check is on and ranks selected differently.
    """
    group = get_parallel().attn_tp_group
    if group.world_size == 1 or selected.numel() == 0:
        return selected
    if envs.CHECK_INDEX_AGREEMENT.get():
        check_agreement(selected, layer_id, group.device_group)
    if sglang_envs.SGLANG_DSA_TOPK_BROADCAST.get():
        return group.broadcast(selected, src=0)
    return selected


def check_agreement(selected: torch.Tensor, layer_id: int, group: dist.ProcessGroup) -> None:
    """Compare a selection over a group.

    Raises:
        RuntimeError: on every rank alike, with the first row and place that differ.
    """
    lowest, highest = selected.clone(), selected.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differs = (lowest != highest).nonzero()
    if len(differs) == 0:
        return
    row, place = differs[0].tolist()
    num_rows = len(differs[:, 0].unique())
    raise RuntimeError(
        f"layer {layer_id}: ranks selected different positions in {num_rows} of {selected.shape[0]} rows; "
        f"row {row}, place {place}: {lowest[row, place]} on one, {highest[row, place]} on another, expected "
        "the same. The indexer's inputs or its kernels differ between ranks; SGLANG_DSA_TOPK_BROADCAST=1 "
        "makes all follow the first"
    )
