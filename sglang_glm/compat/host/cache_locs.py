"""Cache slots that a draft round writes to, on the CPU."""

import torch


def slots_after(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Look up the slots of `count` positions of each request.

    Args:
        req_pool_indices: `[batch_size]`, the block table's row of each request.
        req_to_token: `[max_requests, max_context]` int32.
        start_offset: `[batch_size]`, the first position.
        count: Positions a request.

    Returns:
        `[batch_size, count]` int64.
    """
    positions = start_offset.long()[:, None] + torch.arange(count)
    return req_to_token[req_pool_indices.long()[:, None], positions].long()


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write the slots of each request's next `topk * num_cols` positions.

    Args:
        req_pool_indices: `[batch_size]`.
        req_to_token: `[max_requests, max_context]` int32.
        seq_lens: `[batch_size]`, tokens in the cache.
        out_cache_loc: `[batch_size * topk * num_cols]` int64. Written, request after request.
        topk: Branches of a draft step.
        num_cols: Slots a branch.
        positions: `[batch_size]`; if given, written with `seq_lens`.
        mrope: Unused: the model has one position a token.

    Raises:
        ValueError: `mrope` is given.
    """
    if mrope is not None:
        raise ValueError(
            "mrope positions were asked for, expected none: glm_moe_dsa has no vision part"
        )
    slots = slots_after(req_pool_indices, req_to_token, seq_lens, topk * num_cols)
    out_cache_loc.copy_(slots.flatten())
    if positions is not None:
        positions.copy_(seq_lens)


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: str,
) -> torch.Tensor:
    """Slots of the `draft_token_num` positions after `start_offset`; SGLang asks the platform.

    Args:
        req_pool_indices: `[batch_size]`.
        req_to_token: `[max_requests, max_context]` int32.
        start_offset: `[batch_size]`.
        end_offset: `[batch_size]`, `start_offset + draft_token_num`.
        batch_size: Requests.
        draft_token_num: Positions a request.
        device: The CPU.

    Returns:
        `[batch_size * draft_token_num]` int64, request after request.
    """
    return slots_after(req_pool_indices, req_to_token, start_offset, draft_token_num).flatten()
