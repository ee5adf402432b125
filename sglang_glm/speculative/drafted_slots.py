"""A draft step sees itself and the drafts before it, which no shared selection holds."""

import torch


def add_drafted(
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    step: int,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
) -> torch.Tensor:
    """Put the slots drafted in this round at the end of each row's selection.

    SGLang's draft steps attend over the selection of the last verified token. Its last `step + 1`
    entries give way: padding where the context is short, otherwise a few of thousands.

    Args:
        slots: `[batch_size, index_topk]` int32, -1 padded.
        seq_lens: `[batch_size]`, verified length; the step's own row is at `seq_lens + step`.
        step: Draft step, from 0.
        req_to_token: `[max_requests, max_context]`, slot of each position of each request.
        req_pool_indices: `[batch_size]`, row of `req_to_token` of each request.

    Returns:
        `[batch_size, index_topk]` int32, a new tensor.
    """
    positions = seq_lens[:, None] + torch.arange(step + 1, device=seq_lens.device)
    drafted = req_to_token[req_pool_indices.long()[:, None], positions.long()]
    return torch.cat([slots[:, : -(step + 1)], drafted.to(slots.dtype)], dim=1)
