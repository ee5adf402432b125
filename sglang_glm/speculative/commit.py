"""What a verify round hands back to SGLang."""

from __future__ import annotations

import torch


def commit(
    candidates: torch.Tensor,
    accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    rows: torch.Tensor,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    """Write the accepted part of each chain in the form that SGLang reads.

    The token after node j is written to `predicts` at node j's row: the next draft while it was
    accepted, `last_tokens` after the last accepted node. Rows of rejected nodes stay untouched.

    Args:
        candidates: `[batch_size, num_nodes]`, the token of each node.
        accepted: `[batch_size]` int64, drafts accepted.
        last_tokens: `[batch_size]`, the target's token after the last accepted node.
        rows: `[batch_size, num_nodes]` int64, the verify row of each node.
        predicts: `[batch_size * num_nodes]` int32. Written.
        accept_index: `[batch_size, steps + 1]` int32, filled with -1. Written: rows of node 0 and of
            every accepted draft.
        accept_token_num: `[batch_size]` int32. Written: `accepted`.
    """
    nodes = torch.arange(accept_index.shape[1])
    taken = nodes <= accepted[:, None]
    taken_rows = rows[:, : nodes.shape[0]]
    accept_index.copy_(torch.where(taken, taken_rows, -1))
    accept_token_num.copy_(accepted)
    tokens = torch.cat([candidates[:, 1:], candidates[:, :1]], dim=1)
    tokens = tokens.scatter(1, accepted[:, None], last_tokens[:, None].to(tokens.dtype))
    predicts[taken_rows[taken]] = tokens[:, : nodes.shape[0]][taken].to(predicts.dtype)
