"""Requests to generate that would end a process of the server are answered with 400 instead."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.runtime_context import get_exec, get_observability
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_glm.compat.stop_patterns import check_stop_regex
from sglang_glm.config import is_glm_moe_dsa

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from sglang.srt.managers.tokenizer_manager import TokenizerManager

MAX_SAMPLES = 1024
"""Answers to one prompt; each is a request of its own, made before anything of it is checked."""

MAX_TOP_K = 2**31 - 1

MAX_LOGIT_BIAS = 1e30
"""In fp32 it is finite even after the division by the lowest temperature that is not greedy, 1e-6."""

_SESSION_FIELDS = {
    "id": str,
    "rid": str,
    "offset": int,
    "replace": bool,
    "drop_previous_output": bool,
}


def generate_request(
    original: Callable[..., AsyncIterator[dict]],
    self: TokenizerManager,
    obj: Any,
    request: Any = None,
) -> AsyncIterator[dict]:
    """AROUND hook: SGLang's form, which copies a request for each of its answers before all checks.

    Raises:
        ValueError: more answers are asked for than that copying is quick for; SGLang answers it with 400.
    """
    if is_glm_moe_dsa(self.model_config.hf_config.architectures):
        check_samples(obj)
    return original(self, obj, request)


def check_samples(obj: Any) -> None:
    """Refuse more answers to a prompt than `MAX_SAMPLES`: the HTTP server stands still while it copies.

    Raises:
        ValueError: names the number.
    """
    params = getattr(obj, "sampling_params", None) or {}
    for one in params if isinstance(params, list) else [params]:
        count = one.get("n")
        if isinstance(count, int) and count > MAX_SAMPLES:
            raise ValueError(
                f"n is {count}, expected at most {MAX_SAMPLES} answers to a prompt; send several requests"
            )


def validate_one_request(
    original: Callable[..., None],
    self: TokenizerManager,
    obj: Any,
    input_ids: Sequence[int] | None,
) -> None:
    """AROUND hook: SGLang's checks of a request, preceded by those that it lacks.

    Nearly all that they refuse ends a process of the server, and every request with it. Other models are left alone:
    multimodal ones write ids beyond the vocabulary on purpose.

    Raises:
        ValueError: names what is wrong; SGLang answers it with 400.
    """
    vocab_size = self.model_config.vocab_size
    if is_glm_moe_dsa(self.model_config.hf_config.architectures):
        if input_ids is not None:
            check_prompt_ids(input_ids, vocab_size)
            check_positions(obj, len(input_ids))
        check_logprobs(obj, vocab_size)
        check_sampling(obj, vocab_size)
        check_session(obj)
        check_logit_processor(obj)
        check_embeddings(obj, self.model_config.hidden_size)
        check_labels(obj)
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


def check_sampling(obj: Any, vocab_size: int) -> None:
    """Refuse parameters that pass SGLang's checks and then leave a tensor's type, or the vocabulary.

    Args:
        obj: One request.
        vocab_size: Columns of the logits.

    Raises:
        ValueError: names the parameter and its value.
    """
    params = getattr(obj, "sampling_params", None) or {}
    top_k = params.get("top_k")
    if isinstance(top_k, int) and top_k > MAX_TOP_K:
        raise ValueError(
            f"top_k is {top_k}, expected -1, for the whole vocabulary, or 1 to {MAX_TOP_K}"
        )
    biases = params.get("logit_bias") or {}
    for token_id, bias in biases.items() if isinstance(biases, dict) else ():
        if not isinstance(bias, (int, float)) or not abs(bias) <= MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias of {token_id} is {bias!r}, expected a number from {-MAX_LOGIT_BIAS:g} to "
                f"{MAX_LOGIT_BIAS:g}"
            )
    if params.get("min_new_tokens"):
        # Until then their logits are lowered; at other times such an id is one that never comes.
        for token_id in params.get("stop_token_ids") or []:
            if token_id is not None and not 0 <= int(token_id) < vocab_size:
                raise ValueError(
                    f"stop_token_ids has {token_id} with min_new_tokens, expected token ids from 0 to "
                    f"{vocab_size - 1}"
                )


def check_session(obj: Any) -> None:
    """Refuse parameters of a session that are of another type: a scheduler looks them up and slices by them.

    Raises:
        ValueError: names the parameter and its value.
    """
    for name, value in (getattr(obj, "session_params", None) or {}).items():
        if name not in _SESSION_FIELDS:
            raise ValueError(
                f"session_params has {name!r}, expected some of {', '.join(_SESSION_FIELDS)}"
            )
        if value is not None and type(value) is not _SESSION_FIELDS[name]:
            raise ValueError(
                f"session_params.{name} is {value!r}, expected {_SESSION_FIELDS[name].__name__}"
            )


def check_logit_processor(obj: Any) -> None:
    """Refuse a logit processor that cannot be loaded, where the server allows any.

    Raises:
        ValueError: says why.
    """
    processor = getattr(obj, "custom_logit_processor", None)
    if not processor or not get_exec().features.enable_custom_logit_processor:
        return  # without the flag SGLang refuses it, unread
    try:
        CustomLogitProcessor.from_str(processor)
    except Exception as error:
        raise ValueError(
            "custom_logit_processor cannot be loaded, expected the text of CustomLogitProcessor.to_str(): "
            f"{type(error).__name__}: {error}"
        ) from None


def check_embeddings(obj: Any, hidden_size: int) -> None:
    """Refuse embeddings that no layer can take.

    Args:
        obj: One request.
        hidden_size: Numbers in an embedding.

    Raises:
        ValueError: names the position and what is wrong there.
    """
    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError(
            f"positional_embed_overrides is a {type(overrides).__name__}, expected PositionalEmbeds, which "
            "has no form over HTTP; leave it out"
        )
    for position, row in enumerate(getattr(obj, "input_embeds", None) or []):
        if len(row) != hidden_size or not all(map(math.isfinite, row)):
            raise ValueError(
                f"input_embeds[{position}] has {len(row)} numbers, expected {hidden_size}, all finite"
            )


def check_labels(obj: Any) -> None:
    """Refuse labels that the server's metrics do not have; counting by them ends the HTTP server.

    Raises:
        ValueError: names the label and the flag.
    """
    observability = get_observability()
    allowed = observability.tokenizer_metrics_allowed_custom_labels or ()
    for name in getattr(obj, "custom_labels", None) or {}:
        if name not in allowed and observability.enable_metrics:
            raise ValueError(
                f"custom_labels has {name!r}, expected some of {list(allowed)}; start the server with "
                "--tokenizer-metrics-allowed-custom-labels for others"
            )


def check_positions(obj: Any, num_tokens: int) -> None:
    """Refuse positions to score at that the prompt does not have.

    Args:
        obj: One request.
        num_tokens: Tokens of its prompt.

    Raises:
        ValueError: names the field and the position.
    """
    for field in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        for position in getattr(obj, field, None) or []:
            if not 0 <= position < num_tokens:
                raise ValueError(
                    f"{field} has {position}, expected positions of the prompt, 0 to {num_tokens - 1}"
                )
