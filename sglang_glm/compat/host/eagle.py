"""Results of a verify round on the CPU."""

import torch


def fill_bonus_tokens_func(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last committed token of each request, from which the next round drafts.

    Args:
        accept_tokens: `[batch_size * accept_stride]` or `[batch_size, accept_stride]`, the committed
            tokens of each request and padding.
        accept_lens: `[batch_size]`, how many are committed; at least 1.
        bonus_tokens: `[batch_size]` int32. Written.
        accept_stride: Tokens a request, padding included.
        batch_size: Requests.
    """
    by_request = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(by_request.gather(1, accept_lens.long()[:, None] - 1).squeeze(1))
