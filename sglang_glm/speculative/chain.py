"""A chain of draft tokens: its layout for the verify forward, and what of it is accepted.

Node 0 of a request is the token sampled last, node i the draft of step i - 1. Node j of request b
is row `b * num_nodes + j` of the verify forward; the target's answer at node j judges node j + 1.
Pure torch; SGLang's own forms are CUDA kernels over general trees.
"""

from __future__ import annotations

import torch


def chain_links(batch_size: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and successors of every chain.

    Args:
        batch_size: Requests.
        num_nodes: Nodes of a chain, node 0 included.

    Returns:
        `(rows, successors)`, both `[batch_size, num_nodes]` int64: the verify row of each node, and
        the node after it, -1 after the last.
    """
    nodes = torch.arange(num_nodes)
    rows = torch.arange(batch_size)[:, None] * num_nodes + nodes
    successors = torch.where(nodes + 1 < num_nodes, nodes + 1, -1).expand(batch_size, -1)
    return rows, successors


def accept_greedy(candidates: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """Count the drafts that equal what the target would have chosen, up to the first that does not.

    Args:
        candidates: `[batch_size, num_nodes]`, the token of each node.
        target_tokens: `[batch_size, num_nodes]`, the target's choice after each node.

    Returns:
        `[batch_size]` int64, at most `num_nodes - 1`.
    """
    return _leading(candidates[:, 1:] == target_tokens[:, :-1])


def accept_sampled(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts at random so that each emitted token has exactly the target's distribution.

    A draft x is kept with probability p(x). Otherwise the token is drawn from p without x:
    P(y) = (1 - p(x)) * p(y) / (1 - p(x)) for every other y. The draft model's own probabilities do
    not enter, since it proposes one token only.

    Args:
        candidates: `[batch_size, num_nodes]` int64, the token of each node.
        target_probs: `[batch_size, num_nodes, vocab_size]`, the target's distribution after each
            node. Rows need not sum to one.
        coins: `[batch_size, num_nodes]` fp32 in [0, 1); coin j judges node j + 1.
        final_coins: `[batch_size]` fp32 in [0, 1), for the token that ends the round.
        threshold_single: A draft whose probability reaches this is kept whatever the coin says.
        threshold_acc: Probabilities are divided by this before the coin is compared. Anything but 1
            for both thresholds trades the target's distribution for acceptance.

    Returns:
        `(accepted, last_tokens)`, both `[batch_size]` int64: the drafts kept, and the token that
        follows them.
    """
    probs = target_probs.double()
    probs = probs / probs.sum(-1, keepdim=True)
    drafts = candidates[:, 1:, None].long()
    draft_probs = probs[:, :-1].gather(-1, drafts).squeeze(-1)
    # Strictly below: a coin of exactly 0 must not keep a token of probability 0.
    kept = (coins[:, : draft_probs.shape[1]] < draft_probs / threshold_acc) | (
        draft_probs >= threshold_single
    )
    accepted = _leading(kept)

    requests = torch.arange(candidates.shape[0])
    last = probs[requests, accepted]
    rejected = accepted < drafts.shape[1]
    remainder = last.clone()
    remainder[rejected] = remainder[rejected].scatter(
        1, drafts[requests[rejected], accepted[rejected]], 0.0
    )
    # Where rounding left nothing beside the rejected draft, the draft was all there is.
    empty = remainder.sum(-1) <= 0
    remainder[empty] = last[empty]
    return accepted, draw(remainder, final_coins)


def draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """Draw one index a row with probability proportional to its weight.

    Args:
        weights: `[num_rows, vocab_size]` fp64, non-negative, a positive one in each row.
        coins: `[num_rows]` in [0, 1).

    Returns:
        `[num_rows]` int64; never an index of weight 0.
    """
    cumulative = weights.cumsum(-1)
    threshold = coins.double()[:, None] * cumulative[:, -1:]
    return (cumulative > threshold).int().argmax(-1)


def _leading(kept: torch.Tensor) -> torch.Tensor:
    """How many values are true before the first false one, by row."""
    return kept.long().cumprod(-1).sum(-1)
