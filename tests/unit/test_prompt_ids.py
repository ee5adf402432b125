"""Token ids of a prompt, before they reach a scheduler.

test_ids_of_the_vocabulary     both edges pass
test_ids_beyond                each side of the vocabulary, anywhere in the prompt, and what is no id
test_no_ids                    an empty text too is a prompt without ids
test_other_models              their ids are theirs: multimodal ones write some beyond the vocabulary
test_sglang_checks_still_run   and see what ours has passed
"""

import types
from typing import Any

import pytest

from sglang_glm.compat.prompt_ids import check_prompt_ids, validate_one_request

VOCAB = 896


def request(architecture: str, input_ids: list[Any] | None) -> list[list[Any] | None]:
    """Send one request through the hook and return what reached SGLang's own checks."""
    reached = []
    manager: Any = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            vocab_size=VOCAB, hf_config=types.SimpleNamespace(architectures=[architecture])
        )
    )
    validate_one_request(lambda self, obj, ids: reached.append(ids), manager, object(), input_ids)
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


@pytest.mark.parametrize("ids", [[5, VOCAB], []])
def test_other_models(ids: list[int]) -> None:
    assert request("Qwen2VLForConditionalGeneration", ids) == [ids]


@pytest.mark.parametrize("ids", [[5, 6], None])
def test_sglang_checks_still_run(ids: list[int] | None) -> None:
    assert request("GlmMoeDsaForCausalLM", ids) == [ids]
