"""`index_share_for_mtp_iteration`: the draft steps of a round reuse one selection of positions.

The selection is the one of the last verified token, which draft extend made; SGLang carries it by
request. A draft step sees more than that token saw: itself and the drafts before it. Those
positions always join the selection, in place of its lowest-ranked ones where it is full. So a
context within index_topk is attended to in full with or without sharing, and no step is blind to
the tokens that it continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def carried_selection(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """The selection that the requests bring to this forward.

    Args:
        forward_batch: The batch.

    Returns:
        `[batch_size, index_topk]` int32 request-local positions, best first and -1 padded, a row of
        -1 for a request that brings none; or None outside a draft step or when nobody brings any.
    """
    if not forward_batch.reuse_dsa_topk_indices:
        return None
    return forward_batch.spec_info.dsa_topk_indices


def extend_selection(
    carried: torch.Tensor, verified_len: int, cache_seqlen: int
) -> torch.Tensor | None:
    """Add a draft step's own positions to a request's carried selection.

    Args:
        carried: `[index_topk]` int32, best first, -1 padded; may hold drafted positions of earlier
            steps of this round, which are added anew.
        verified_len: Positions below this are verified.
        cache_seqlen: Positions that the step sees, its own included.

    Returns:
        `[index_topk]` int32 in the same form, or None where the step has to select for itself:
        when `carried` holds no verified position, and when the drafts are the first to exceed
        index_topk, since a selection of everything ranks nothing.
    """
    width = carried.shape[0]
    if verified_len <= width < cache_seqlen:
        return None
    verified = carried[(carried >= 0) & (carried < verified_len)]
    if verified.numel() == 0:
        return None
    drafted = torch.arange(verified_len, cache_seqlen, dtype=carried.dtype)[-width:]
    chosen = torch.cat([verified[: width - drafted.shape[0]], drafted])
    return F.pad(chosen, (0, width - chosen.shape[0]), value=-1)
