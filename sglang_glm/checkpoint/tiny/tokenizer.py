"""The tiny model's tokenizer: whole words, bytes for all else, and GLM's special tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_glm.checkpoint.tiny.words import vocabulary
from sglang_glm.checkpoint.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS

_WORD_SCORE = -1.0
_BYTE_SCORE = -10.0
"""Log-probabilities of the unigram model: a known word always beats its spelling."""


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer.

    A unigram model needs no entries for the beginnings of words, as byte-pair merges would; the
    embedding stays small.

    Returns:
        A tokenizer whose text tokens come first (bytes, then words) and whose added tokens come
        last, in GLM's order.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces: list[tuple[str, float]] = [
        (char, _BYTE_SCORE) for char in sorted(pre_tokenizers.ByteLevel.alphabet())
    ]
    for word in vocabulary():
        (split,) = byte_level.pre_tokenize_str(word)
        if len(split[0]) > 1:
            pieces.append((split[0], _WORD_SCORE))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )
    return tokenizer
