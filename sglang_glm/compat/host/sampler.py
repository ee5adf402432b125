"""Sampling on the CPU where no token is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def preprocess_logits(
    original: Callable[..., torch.Tensor], self: Any, logits: torch.Tensor, sampling_info: Any
) -> torch.Tensor:
    """AROUND hook: SGLang's form, after which every row has a token to draw.

    A grammar that recurses without a terminal, as `root ::= root` or the schema `{"$ref": "#"}`, leaves
    no token at some position. The probabilities of such a row are NaN, on which torch.multinomial
    raises. All tokens are made equally likely instead: the grammar rejects the one that is drawn, and
    SGLang ends that request alone.

    Args:
        original: SGLang's form.
        self: The sampler.
        logits: `[num_rows, vocab_size]`, -inf where a token is not allowed. Written.
        sampling_info: Of the batch.

    Returns:
        `logits`.
    """
    logits = original(self, logits, sampling_info)
    return logits.masked_fill_(logits.amax(-1, keepdim=True) == float("-inf"), 0.0)
