"""Layout and greedy verification of draft chains on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_glm.speculative.chain import accept_greedy, chain_links
from sglang_glm.speculative.commit import commit

if TYPE_CHECKING:
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode


def build_tree_kernel_efficient_func(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: TreeMaskMode,
) -> None:
    """Fill in the verify forward's positions, links and mask for one chain a request.

    Args:
        parent_list: Ignored, as `top_scores_index` is: a chain has one shape.
        top_scores_index: See `parent_list`.
        seq_lens: `[batch_size]`, tokens in the cache; node j of a chain is at `seq_lens + j`.
        tree_mask: Flat bool, all true; request after request `[num_nodes, seq_len + num_nodes]`, or
            `[num_nodes, num_nodes]` when the mode leaves the cached tokens out. Written.
        positions: `[batch_size * num_nodes]` int64. Written.
        retrieve_index: `[batch_size, num_nodes]` int64, as the next two. Written.
        retrieve_next_token: Written.
        retrieve_next_sibling: Already -1 everywhere, which is what a chain needs.
        topk: Branches of a node; must be 1.
        spec_steps: Draft steps.
        num_verify_tokens: `num_nodes`.
        tree_mask_mode: Layout of `tree_mask`.

    Raises:
        ValueError: a tree with branches, or a packed mask.
    """
    if topk != 1:
        raise ValueError(
            f"--speculative-eagle-topk is {topk}, expected 1: the CPU verifies chains only"
        )
    batch_size = seq_lens.shape[0]
    rows, successors = chain_links(batch_size, num_verify_tokens)
    retrieve_index.copy_(rows)
    retrieve_next_token.copy_(successors)
    nodes = torch.arange(num_verify_tokens)
    positions.copy_((seq_lens.long()[:, None] + nodes).flatten())
    _fill_mask(tree_mask, seq_lens, num_verify_tokens, tree_mask_mode)


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the leading drafts that the target would have chosen; see `commit` for what is written.

    Args:
        predicts: `[batch_size * num_nodes]` int32. Written at accepted nodes.
        accept_index: `[batch_size, steps + 1]` int32, filled with -1. Written.
        accept_token_num: `[batch_size]` int32. Written: drafts accepted.
        candidates: `[batch_size, num_nodes]`, the token of each node.
        retrieve_index: `[batch_size, num_nodes]`, the row of each node.
        retrieve_next_token: Ignored, as `retrieve_next_sibling` and `topk` are: a chain is assumed.
        retrieve_next_sibling: See `retrieve_next_token`.
        target_predict: `[batch_size, num_nodes]`, the target's choice after each node.
        topk: See `retrieve_next_token`.

    Returns:
        The three written tensors.
    """
    accepted = accept_greedy(candidates, target_predict)
    last_tokens = target_predict.gather(1, accepted[:, None]).squeeze(1)
    commit(
        candidates, accepted, last_tokens, retrieve_index, predicts, accept_index, accept_token_num
    )
    return predicts, accept_index, accept_token_num


def _fill_mask(
    tree_mask: torch.Tensor, seq_lens: torch.Tensor, num_nodes: int, mode: TreeMaskMode
) -> None:
    # Imported late: the module is being entered while this one loads.
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    causal = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril()
    if mode == TreeMaskMode.QLEN_ONLY:
        tree_mask.view(-1, num_nodes, num_nodes)[: len(seq_lens)] = causal
        return
    if mode != TreeMaskMode.FULL_MASK:
        raise ValueError(
            f"tree mask mode is {mode.name}, expected FULL_MASK or QLEN_ONLY on the CPU"
        )
    start = 0
    for seq_len in seq_lens.tolist():
        width = seq_len + num_nodes
        block = tree_mask[start : start + num_nodes * width].view(num_nodes, width)
        block[:, seq_len:] = causal
        start += num_nodes * width
