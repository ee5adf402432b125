"""What sampled output must be distributed as, from transformers' logits."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path

import torch

from sglang_glm.verification.oracle import Oracle


def marginals(
    model: str, prompt: list[int], positions: int, temperature: float, top_p: float
) -> torch.Tensor:
    """Distribution of each output position, over all texts that lead to it.

    Args:
        model: A checkpoint of `--mtp-perfect`, whose target depends on the last three tokens alone:
            so the texts are summed by their last three.
        prompt: At least three tokens.
        positions: Output positions.
        temperature: Above 0.
        top_p: Below it, the smallest set of likeliest tokens that reaches it is kept.

    Returns:
        `[positions, vocab_size]` fp64.
    """
    oracle = Oracle(Path(model))

    @functools.cache
    def after(recent: tuple[int, ...]) -> torch.Tensor:
        logprobs = oracle.run([*prompt[:-3], *recent]).logprobs[-1].double()
        probs = (logprobs / temperature).softmax(-1)
        ranked, order = probs.sort(descending=True)
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0.0
        return torch.zeros_like(probs).scatter(0, order, ranked / ranked.sum())

    by_recent = {tuple(prompt[-3:]): 1.0}
    found = []
    for _ in range(positions):
        marginal = torch.zeros(oracle.config.vocab_size, dtype=torch.float64)
        longer: dict[tuple[int, ...], float] = defaultdict(float)
        for recent, weight in by_recent.items():
            probs = after(recent)
            marginal += weight * probs
            for token in probs.nonzero().flatten().tolist():
                longer[(*recent[1:], token)] += weight * float(probs[token])
        found.append(marginal)
        by_recent = longer
    return torch.stack(found)
