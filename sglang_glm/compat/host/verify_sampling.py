"""Verification of sampled (not greedy) output on the CPU, where SGLang has no function for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_glm.speculative.chain import accept_sampled
from sglang_glm.speculative.commit import commit

if TYPE_CHECKING:
    import torch


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafts so that every token keeps the target's distribution; see `accept_sampled`.

    Args:
        predicts: `[batch_size * num_nodes]` int32. Written, as the next two; see `commit`.
        accept_index: `[batch_size, steps + 1]` int32, filled with -1.
        accept_token_num: `[batch_size]` int32.
        candidates: `[batch_size, num_nodes]`, the token of each node.
        retrive_index: `[batch_size, num_nodes]`, the row of each node (SGLang's spelling).
        retrive_next_token: Ignored, as `retrive_next_sibling` is: a chain is assumed.
        retrive_next_sibling: See `retrive_next_token`.
        uniform_samples: `[batch_size, num_nodes]` in [0, 1).
        uniform_samples_for_final_sampling: `[batch_size]` in [0, 1).
        target_probs: `[batch_size, num_nodes, vocab_size]`.
        draft_probs: Ignored: a draft is one token, not a distribution.
        threshold_single: See `accept_sampled`.
        threshold_acc: See `accept_sampled`.
        deterministic: Ignored; the result depends on the arguments alone.
    """
    accepted, last_tokens = accept_sampled(
        candidates,
        target_probs,
        uniform_samples,
        uniform_samples_for_final_sampling,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
    )
    commit(
        candidates, accepted, last_tokens, retrive_index, predicts, accept_index, accept_token_num
    )
