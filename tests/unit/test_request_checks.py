"""Requests that would end a scheduler.

test_ids_of_the_vocabulary     both edges pass
test_ids_beyond                each side of the vocabulary, anywhere in the prompt, and what is no id
test_no_ids                    an empty text too is a prompt without ids
test_logprobs                  of positions and tokens that there are none of
test_stop_regex*               a pattern that does not compile, alone or among others, or is too large
test_sampling                  numbers beyond a tensor's type; stop ids where their logits are written
test_sampling_that_is_served   the edges of these, and ids that no tensor is written at
test_exponential_regex         repeats of nothing but repeats, and patterns that only look like it
test_positions                 to score at, beyond the prompt
test_session                   parameters of another type, and such as there are none of
test_logit_processor           what cannot be loaded, where the server takes any
test_embeddings                rows of another width, NaN, and objects that HTTP cannot carry
test_labels                    metrics that are counted by labels that they lack
test_samples                   too many answers, before SGLang copies the request for each
test_other_models              their ids are theirs: multimodal ones write some beyond the vocabulary
test_sglang_checks_still_run   and see what ours has passed
"""

import types
from typing import Any

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_glm.compat import request_checks
from sglang_glm.compat.request_checks import (
    MAX_SAMPLES,
    check_prompt_ids,
    generate_request,
    validate_one_request,
)

VOCAB = 896
HIDDEN = 4


@pytest.fixture(autouse=True)
def server_flags(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What the server was started with."""
    flags = types.SimpleNamespace(
        enable_custom_logit_processor=False,
        enable_metrics=True,
        tokenizer_metrics_allowed_custom_labels=["team"],
    )
    monkeypatch.setattr(request_checks, "get_exec", lambda: types.SimpleNamespace(features=flags))
    monkeypatch.setattr(request_checks, "get_observability", lambda: flags)
    return flags


def request(
    architecture: str, input_ids: list[Any] | None, **fields: object
) -> list[list[Any] | None]:
    """Send one request through the hook and return what reached SGLang's own checks."""
    reached = []
    manager: Any = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            hf_config=types.SimpleNamespace(architectures=[architecture]),
        )
    )
    obj = types.SimpleNamespace(**fields)
    validate_one_request(lambda self, obj, ids: reached.append(ids), manager, obj, input_ids)
    return reached


def test_ids_of_the_vocabulary() -> None:
    check_prompt_ids([0, VOCAB - 1], VOCAB)


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**70, 1.5, float("nan"), None, "a", [5]])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_ids_beyond(bad: Any, position: int) -> None:
    ids: list[Any] = [5] * 8
    ids[position] = bad
    with pytest.raises(ValueError, match=rf"input_ids\[{position}\] is .*from 0 to {VOCAB - 1};"):
        request("GlmMoeDsaForCausalLM", ids)


def test_no_ids() -> None:
    with pytest.raises(ValueError, match=r"the prompt has 0 tokens, expected at least 1;"):
        request("GlmMoeDsaForCausalLM", [])


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("logprob_start_len", (-2, -(2**40)), (-1, 0, None)),
        ("top_logprobs_num", (-1, VOCAB + 1, 2**40), (0, VOCAB, None)),
    ],
)
def test_logprobs(field: str, bad: tuple[int, ...], good: tuple[int | None, ...]) -> None:
    asked = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0}
    for value in bad:
        with pytest.raises(ValueError, match=rf"{field} is {value}, expected"):
            request("GlmMoeDsaForCausalLM", [5], **(asked | {field: value}))
        unasked = asked | {field: value, "return_logprob": False}
        assert request("GlmMoeDsaForCausalLM", [5], **unasked) == [[5]]
    for value in good:
        assert request("GlmMoeDsaForCausalLM", [5], **(asked | {field: value})) == [[5]]


def test_stop_regex_too_large() -> None:
    with pytest.raises(ValueError, match="repetition number is too large"):
        request("GlmMoeDsaForCausalLM", [5], sampling_params={"stop_regex": "a{99999999999}"})


@pytest.mark.parametrize("stop_regex", ["(", ["a", "(b"]])
def test_stop_regex(stop_regex: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"stop_regex is '\(b?', expected a regular expression: "):
        request("GlmMoeDsaForCausalLM", [5], sampling_params={"stop_regex": stop_regex})
    for good in ("a+", ["a+", "b"], None):
        asked = {"stop_regex": good}
        assert request("GlmMoeDsaForCausalLM", [5], sampling_params=asked) == [[5]]


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("(a+)+", True),
        ("(x+x+)+y", True),
        ("b(?:(a*))*", True),
        ("(a+?)*$", True),
        ("c|d(e|(f+)+)", True),
        (r"(\s*\w*)*", True),
        ("(a+,)+", False),
        ("(foo|bar)+", False),
        ("(a+){3}", False),
        ("(a{2,3})+", False),
        ("(a++)+", False),
        (r"\n+END\s*$", False),
        ("", False),
    ],
)
def test_exponential_regex(pattern: str, refused: bool) -> None:
    asked = {"stop_regex": ["x", pattern]}
    if refused:
        with pytest.raises(ValueError, match="which repeats what consists of repeats"):
            request("GlmMoeDsaForCausalLM", [5], sampling_params=asked)
    else:
        assert request("GlmMoeDsaForCausalLM", [5], sampling_params=asked) == [[5]]


@pytest.mark.parametrize("field", ["token_indices_to_pool", "multi_item_delimiter_indices"])
def test_positions(field: str) -> None:
    for bad in (3, -1):
        with pytest.raises(ValueError, match=f"{field} has {bad}, expected .* 0 to 2"):
            request("GlmMoeDsaForCausalLM", [5, 6, 7], **{field: [0, bad]})
    assert request("GlmMoeDsaForCausalLM", [5, 6, 7], **{field: [0, 2]}) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_k": 2**31}, "top_k is 2147483648, expected -1"),
        ({"min_new_tokens": 1, "stop_token_ids": [5, VOCAB]}, f"stop_token_ids has {VOCAB}"),
        ({"min_new_tokens": 1, "stop_token_ids": [-1]}, "stop_token_ids has -1"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias of 5 is nan, expected a number"),
        ({"logit_bias": {"4": 1.0, "5": float("-inf")}}, "logit_bias of 5 is -inf"),
        ({"logit_bias": {"5": 1e39}}, r"logit_bias of 5 is 1e\+39"),
        ({"logit_bias": {"5": "x"}}, "logit_bias of 5 is 'x'"),
        ({"logit_bias": {"5": None}}, "logit_bias of 5 is None"),
    ],
)
def test_sampling(sampling: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        request("GlmMoeDsaForCausalLM", [5], sampling_params=sampling)
    assert request("Qwen2ForCausalLM", [5], sampling_params=sampling) == [[5]]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 2**31 - 1},
        {"top_k": -1},
        {"logit_bias": {"5": -1e30, "6": 100}},
        {"stop_token_ids": [VOCAB, -1, None]},
        {"min_new_tokens": 1, "stop_token_ids": [0, VOCAB - 1, None]},
        None,
    ],
)
def test_sampling_that_is_served(sampling: dict | None) -> None:
    assert request("GlmMoeDsaForCausalLM", [5], sampling_params=sampling) == [[5]]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"id": ["s"]}, r"session_params.id is \['s'\], expected str"),
        ({"id": "s", "rid": {}}, "session_params.rid is {}, expected str"),
        ({"id": "s", "offset": "x"}, "session_params.offset is 'x', expected int"),
        ({"id": "s", "offset": 1e30}, r"session_params.offset is 1e\+30, expected int"),
        ({"id": "s", "replace": 1}, "session_params.replace is 1, expected bool"),
        ({"name": "s"}, "session_params has 'name', expected some of id, rid, offset"),
    ],
)
def test_session(params: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        request("GlmMoeDsaForCausalLM", [5], session_params=params)
    served = {"id": "s", "rid": None, "offset": -3, "replace": True, "drop_previous_output": False}
    for good in (served, {}, None):
        assert request("GlmMoeDsaForCausalLM", [5], session_params=good) == [[5]]


@pytest.mark.parametrize(
    "processor", ["bogus", "[]", "{}", '{"callable": "zz"}', '{"callable": "00"}', "null"]
)
def test_logit_processor(processor: str, server_flags: types.SimpleNamespace) -> None:
    asked = {"custom_logit_processor": processor}
    assert request("GlmMoeDsaForCausalLM", [5], **asked) == [[5]]
    server_flags.enable_custom_logit_processor = True
    with pytest.raises(ValueError, match="custom_logit_processor cannot be loaded, expected"):
        request("GlmMoeDsaForCausalLM", [5], **asked)
    for good in (DisallowedTokensLogitsProcessor.to_str(), None):
        assert request("GlmMoeDsaForCausalLM", [5], custom_logit_processor=good) == [[5]]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_embeds": [[0.5] * 3]}, r"input_embeds\[0\] has 3 numbers, expected 4"),
        ({"input_embeds": [[0.5] * 4, [0.5] * 5]}, r"input_embeds\[1\] has 5 numbers"),
        ({"input_embeds": [[0.5, 0.5, 0.5, float("nan")]]}, "all finite"),
        ({"input_embeds": [[0.5, 0.5, 0.5, float("inf")]]}, "all finite"),
        ({"positional_embed_overrides": {}}, "positional_embed_overrides is a dict"),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides is a list"),
    ],
)
def test_embeddings(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        request("GlmMoeDsaForCausalLM", [5], **fields)
    overrides = PositionalEmbeds(embeds=[torch.zeros(HIDDEN)], positions=[0])
    good = {"input_embeds": [[0.5] * HIDDEN] * 2, "positional_embed_overrides": overrides}
    assert request("GlmMoeDsaForCausalLM", [5], **good) == [[5]]


def test_labels(server_flags: types.SimpleNamespace) -> None:
    asked = {"custom_labels": {"team": "a", "other": "b"}}
    with pytest.raises(ValueError, match=r"custom_labels has 'other', expected some of \['team'\]"):
        request("GlmMoeDsaForCausalLM", [5], **asked)
    assert request("GlmMoeDsaForCausalLM", [5], custom_labels={"team": "a"}) == [[5]]
    server_flags.enable_metrics = False
    assert request("GlmMoeDsaForCausalLM", [5], **asked) == [[5]]


@pytest.mark.parametrize("sampling", [{"n": 10**9}, [{"n": 1}, {"n": MAX_SAMPLES + 1}]])
def test_samples(sampling: Any) -> None:
    def ask(architecture: str, sampling_params: Any) -> str:
        manager: Any = types.SimpleNamespace(
            model_config=types.SimpleNamespace(
                hf_config=types.SimpleNamespace(architectures=[architecture])
            )
        )
        obj = types.SimpleNamespace(sampling_params=sampling_params)
        answer: Any = generate_request(lambda *_: "answered", manager, obj)  # type: ignore[arg-type,return-value]
        return answer

    with pytest.raises(ValueError, match=f"expected at most {MAX_SAMPLES} answers to a prompt"):
        ask("GlmMoeDsaForCausalLM", sampling)
    assert ask("Qwen2ForCausalLM", sampling) == "answered"
    for served in ({"n": MAX_SAMPLES}, {}, None, [{}, {"n": 2}], {"n": None}):
        assert ask("GlmMoeDsaForCausalLM", served) == "answered"


@pytest.mark.parametrize("ids", [[5, VOCAB], []])
def test_other_models(ids: list[int]) -> None:
    assert request("Qwen2VLForConditionalGeneration", ids) == [ids]


@pytest.mark.parametrize("ids", [[5, 6], None])
def test_sglang_checks_still_run(ids: list[int] | None) -> None:
    assert request("GlmMoeDsaForCausalLM", ids) == [ids]
