"""Top-k and top-p on probabilities on the CPU, where SGLang has no function for them."""

import torch


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest tokens of each row and make the row sum to one again.

    Of equally likely tokens the lower ids are kept, so top-k 1 keeps what argmax finds.

    Args:
        probs: `[num_rows, vocab_size]` fp32.
        top_ks: `[num_rows]` integers; larger than the vocabulary keeps all.

    Returns:
        A tensor like `probs`.
    """
    order = probs.sort(dim=-1, descending=True, stable=True)
    dropped = torch.arange(probs.shape[-1]) >= top_ks[:, None]
    return _renormalize(probs, order.indices, dropped)


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Keep the fewest likeliest tokens whose sum passes `top_p`, and renormalise.

    A token is kept while those before it sum to at most `top_p`, as SGLang's torch sampler does.

    Args:
        probs: `[num_rows, vocab_size]` fp32.
        top_ps: `[num_rows]` in (0, 1].

    Returns:
        A tensor like `probs`.
    """
    order = probs.sort(dim=-1, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    return _renormalize(probs, order.indices, before > top_ps[:, None])


def _renormalize(probs: torch.Tensor, indices: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(torch.zeros_like(dropped).scatter(-1, indices, dropped), 0.0)
    return kept / kept.sum(-1, keepdim=True)
