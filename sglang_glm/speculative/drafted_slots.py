"""A draft step sees itself and the drafts before it, which no shared selection holds."""

import torch


def add_drafted(
    selection: torch.Tensor,
    seq_lens: torch.Tensor,
    step: int,
    req_to_token: torch.Tensor | None = None,
    req_pool_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put the positions drafted in this round at the end of each row's selection.

    SGLang's draft steps attend over the selection of the last verified token. Its last `step + 1`
    entries give way: padding where the context is short, otherwise a few of thousands.

    Args:
        selection: `[batch_size, index_topk]` int32, -1 padded.
        seq_lens: `[batch_size]`, verified length; the step's own row is at `seq_lens + step`.
        step: Draft step, from 0.
        req_to_token: `[max_requests, max_context]` slots. With it the entries are slots.
        req_pool_indices: `[batch_size]`, row of `req_to_token` of each request.

    Returns:
        `[batch_size, index_topk]` int32, a new tensor.
    """
    drafted = seq_lens[:, None] + torch.arange(step + 1, device=seq_lens.device)
    if req_to_token is not None and req_pool_indices is not None:
        drafted = req_to_token[req_pool_indices.long()[:, None], drafted.long()]
    return torch.cat([selection[:, : -(step + 1)], drafted.to(selection.dtype)], dim=1)
