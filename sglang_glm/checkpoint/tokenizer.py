"""A small byte-level BPE tokenizer with GLM's special tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.corpus import CORPUS

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

# Dropped from decoded text: control tokens of the conversation.
CONTROL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|image|>",
    "<|video|>",
)
# Kept in decoded text: the reasoning and tool parsers look for them.
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
)
STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

MIN_VOCAB_SIZE = 256 + len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
"""One entry per byte and per added token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Token ids that ``config.json`` names."""

    endoftext: int
    stop: tuple[int, ...]


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Train the tokenizer; the same corpus gives the same merges.

    Args:
        vocab_size: Entries wanted, added tokens included. The corpus may yield fewer; the ids
            above are then unused, as the last ids of the released vocabulary are.

    Returns:
        A tokenizer whose byte and merge tokens come first and whose added tokens come last, in
        GLM's order.

    Raises:
        ValueError: If ``vocab_size`` cannot hold the bytes and the added tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"checkpoint: vocab_size is {vocab_size}, expected at least {MIN_VOCAB_SIZE} "
            "(256 bytes and GLM's added tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Look up the ids that ``config.json`` names.

    Args:
        tokenizer: As made by :func:`train_tokenizer`.

    Returns:
        The ids.
    """
    stop = tuple(token_id(tokenizer, token) for token in STOP_TOKENS)
    return SpecialIds(endoftext=stop[0], stop=stop)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have.

    Raises:
        ValueError: If it has not.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(
            f"checkpoint: the tokenizer lacks {token!r}; write the checkpoint anew with --force"
        )
    return found


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_position_embeddings: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

    Args:
        tokenizer: As made by :func:`train_tokenizer`.
        directory: Existing directory.
        max_position_embeddings: Written as the tokenizer's ``model_max_length``.
    """
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": list(CONTROL_TOKENS),
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position_embeddings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = files("sglang_glm.checkpoint").joinpath("chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
