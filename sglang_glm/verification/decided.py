"""Prompts whose outcome no rounding of a correct server can change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_glm.verification.prompts import random_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_glm.verification.oracle import Oracle

STABLE_BOUND = 5e-4
"""Largest difference that another order of sums may make where every FP8 code is decided."""

_SEEDS = 20
_PIECE = 7


def is_decided(oracle: Oracle, token_ids: Sequence[int]) -> bool:
    """Whether every correct FP32 implementation computes the same for a prompt.

    With FP32 caches no selection may be a near-tie. With FP8 caches a value may sit on the edge
    between two codes, where the order of a sum decides its code, and a code a selection: that shows
    when the oracle itself answers differently once the prompt comes in pieces.

    Args:
        oracle: The reference, with the formats of the server's caches.
        token_ids: The prompt.

    Returns:
        True if it is decided.
    """
    whole = oracle.run(token_ids)
    if "fp8" not in (oracle.formats.latent, oracle.formats.index_key):
        return whole.first_near_tie() is None
    session = oracle.session()
    for start in range(0, len(token_ids), _PIECE):
        session.extend(token_ids[start : start + _PIECE])
    difference = (whole.logprobs - session.result().logprobs).abs().max()
    return float(difference) < STABLE_BOUND


def decided_prompt(oracle: Oracle, vocab: int, length: int) -> list[int] | None:
    """The first random prompt of a length, by seed, that is decided.

    Args:
        oracle: See :func:`is_decided`.
        vocab: Ids are drawn from ``[0, vocab)``.
        length: Tokens wanted.

    Returns:
        Token ids, or None if none of twenty is: long prompts through FP8 caches rarely are.
    """
    for seed in range(_SEEDS):
        ids = random_prompt(vocab, length, seed)
        if is_decided(oracle, ids):
            return ids
    return None
