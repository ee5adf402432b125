"""A draft step sees itself and the drafts before it, which no shared selection holds."""

import torch


def add_drafted(
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    step: int,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
) -> torch.Tensor:
    """Put the slots drafted in this round behind the entries of each row's selection.

    SGLang's draft steps attend over the selection of the last verified token: `min(L, index_topk)`
    slots, then padding. Drafted slots follow without a gap, because some kernels read a count of
    entries instead of looking for -1. Where there is no room the last `step + 1` entries give way, a
    few of thousands.

    Args:
        slots: `[batch_size, index_topk]` int32, -1 padded at the tail.
        seq_lens: `[batch_size]`, verified length `L`; the step's own row is at `L + step`.
        step: Draft step, from 0.
        req_to_token: `[max_requests, max_context]`, slot of each position of each request.
        req_pool_indices: `[batch_size]`, row of `req_to_token` of each request.

    Returns:
        `[batch_size, index_topk]` int32, a new tensor; `drafted_lengths` entries of a row are slots.
    """
    ahead = torch.arange(step + 1, device=seq_lens.device)
    positions = (seq_lens[:, None] + ahead).long()
    drafted = req_to_token[req_pool_indices.long()[:, None], positions]
    columns = seq_lens.clamp(max=slots.shape[1] - (step + 1))[:, None] + ahead
    return slots.scatter(1, columns.long(), drafted.to(slots.dtype))


def drafted_lengths(seq_lens: torch.Tensor, step: int, index_topk: int) -> torch.Tensor:
    """Entries that are slots in each row of `add_drafted`.

    Args:
        seq_lens: `[batch_size]`, verified length.
        step: Draft step, from 0.
        index_topk: Width of a selection.

    Returns:
        `[batch_size]` int32.
    """
    return (seq_lens + step + 1).clamp(max=index_topk).int()
