"""Requests that would end a scheduler are answered with 400 instead."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any

from sglang_glm.config import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def validate_one_request(
    original: Callable[..., None],
    self: TokenizerManager,
    obj: Any,
    input_ids: Sequence[int] | None,
) -> None:
    """AROUND hook: SGLang's checks of a request, preceded by those that it lacks.

    Nearly all that they refuse ends the scheduler, and every request with it. Other models are left alone:
    multimodal ones write ids beyond the vocabulary on purpose.

    Raises:
        ValueError: names what is wrong; SGLang answers it with 400.
    """
    config = self.model_config
    if any(name in ARCHITECTURES for name in config.hf_config.architectures or ()):
        if input_ids is not None:
            check_prompt_ids(input_ids, config.vocab_size)
        check_logprobs(obj, config.vocab_size)
        check_stop_regex(obj)
    original(self, obj, input_ids)


def check_prompt_ids(input_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt without ids, and ids that the embedding has no row for.

    Args:
        input_ids: One prompt.
        vocab_size: Rows of the embedding.

    Raises:
        ValueError: says so, or names the first such id and where it stands.
    """
    if not input_ids:
        raise ValueError(
            "the prompt has 0 tokens, expected at least 1; send some text or input_ids"
        )
    try:
        # Passes in C: a prompt of 200,000 ids takes milliseconds. It is the form SGLang sends on.
        ids = array("q", input_ids)
    except (TypeError, OverflowError):
        pass  # something that is no integer of 64 bits; named below
    else:
        if min(ids) >= 0 and max(ids) < vocab_size:
            return
    for position, token_id in enumerate(input_ids):
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"input_ids[{position}] is {token_id!r}, expected a token id from 0 to {vocab_size - 1}; "
                "check that the prompt was tokenized for this model"
            )


def check_logprobs(obj: Any, vocab_size: int) -> None:
    """Refuse log-probabilities of positions and tokens that there are none of.

    Args:
        obj: One request. An embedding request asks for none.
        vocab_size: Columns of the logits.

    Raises:
        ValueError: names the field and its value.
    """
    if not getattr(obj, "return_logprob", False):
        return
    start, top = obj.logprob_start_len, obj.top_logprobs_num
    if start is not None and start < -1:
        raise ValueError(
            f"logprob_start_len is {start}, expected a position of the prompt, or -1 for log-probabilities "
            "of the output alone"
        )
    if top is not None and not 0 <= top <= vocab_size:
        raise ValueError(f"top_logprobs_num is {top}, expected 0 to {vocab_size}, the vocabulary")


def check_stop_regex(obj: Any) -> None:
    """Refuse patterns that do not compile; SGLang answers those with 500 and no word.

    Raises:
        ValueError: names the pattern and what is wrong with it.
    """
    patterns = (getattr(obj, "sampling_params", None) or {}).get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"stop_regex is {pattern!r}, expected a regular expression: {error}"
            ) from None
