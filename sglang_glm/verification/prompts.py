"""Deterministic prompts of ordinary tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


def ordinary_vocab(checkpoint: Path) -> int:
    """Number of leading token ids that are plain text.

    Args:
        checkpoint: A checkpoint of ours, whose added tokens come after the text tokens.

    Returns:
        The smallest added token's id.
    """
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    return min(int(token["id"]) for token in tokenizer["added_tokens"])


def random_prompt(vocab: int, length: int, seed: int) -> list[int]:
    """Draw a prompt.

    A prompt is a prefix of every longer one with the same seed and vocabulary.

    Args:
        vocab: Ids are drawn from ``[0, vocab)``.
        length: Tokens wanted.
        seed: The seed.

    Returns:
        Token ids, the same on every machine and library version.
    """
    digest = hashlib.sha256(f"prompt:{seed}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(length)
    return [int(value) for value in raw % np.uint64(vocab)]
