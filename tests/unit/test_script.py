"""The scripted model says its text, to the last character, wherever the template opens an answer.

test_says_its_script             reasoning on and off, whatever the prompt ends with
test_says_another_after_a_tool   the second text, with reasoning
test_margin_survives             FP8 caches and a BF16 model still follow; sampling would too
test_drafts_of_a_script          with a perfect MTP layer every draft is accepted
test_parsers_take_it_back        SGLang's reasoning and tool parsers split the text
test_script_refuses              texts that three tokens cannot follow, said so
test_cli_script                  the options reach the spec
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import AutoTokenizer

from sglang_glm.checkpoint.script import script_tokens
from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.tokenizer import train_tokenizer
from sglang_glm.checkpoint.writer import read_manifest, write_checkpoint
from sglang_glm.cli.main import main
from sglang_glm.verification.draft import decode_with_drafts
from sglang_glm.verification.formats import CacheFormats
from sglang_glm.verification.oracle import Oracle, continuation

if TYPE_CHECKING:
    from pathlib import Path

CALL = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
REASONING = "The user wants the weather, so I call the tool."
FIRST = f"{REASONING}</think>Let me look.{CALL}<|observation|>"
SECOND = "Now I know.</think>It is sunny in Paris today."
SPEC = CheckpointSpec(
    num_hidden_layers=2,
    first_k_dense_replace=1,
    indexer_types=("full", "shared"),
    index_topk=6,
    index_n_heads=4,
    n_routed_experts=2,
    moe_intermediate_size=64,
    num_nextn_predict_layers=1,
    mtp_perfect="hidden",
    script=(FIRST, SECOND),
)
ASKED = [{"role": "user", "content": "How is the weather in Paris"}]
ANSWERED = [
    *ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "content": "sunny"},
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("script") / "model"
    write_checkpoint(SPEC, directory)
    return directory


def prompt_of(directory: Path, messages: list[dict], **kwargs: object) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **kwargs
    )


def say(oracle: Oracle, prompt: list[int], count: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(oracle.directory)
    return tokenizer.decode(continuation(oracle.greedy(prompt, count), len(prompt)))


def length_of(text: str) -> int:
    return len(script_tokens(train_tokenizer(SPEC.vocab_size), text))


@pytest.mark.parametrize(
    "ending", ["", ".", " Paris", " the weather", "Let me look.", "你好", "!?"]
)
def test_says_its_script(scripted: Path, ending: str) -> None:
    oracle = Oracle(scripted)
    messages = [{"role": "user", "content": "Tell me about" + ending}]
    count = length_of(FIRST)
    assert say(oracle, prompt_of(scripted, messages), count) == FIRST
    answer = FIRST.split("</think>")[1]
    closed = prompt_of(scripted, messages, enable_thinking=False)
    assert say(oracle, closed, length_of("</think>" + answer) - 1) == answer


def test_says_another_after_a_tool(scripted: Path) -> None:
    prompt = prompt_of(scripted, ANSWERED)
    assert say(Oracle(scripted), prompt, length_of(SECOND)) == SECOND + "<|user|>"


def test_margin_survives(scripted: Path) -> None:
    prompt, count = prompt_of(scripted, ASKED), length_of(FIRST)
    run = Oracle(scripted).greedy(prompt, count)
    best = run.logprobs[len(prompt) - 1 :].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 11.5
    fp8 = CacheFormats(latent="fp8", index_key="fp8", index_query="fp8")
    assert say(Oracle(scripted, formats=fp8), prompt, count) == FIRST
    assert say(Oracle(scripted, dtype=torch.bfloat16), prompt, count) == FIRST


def test_drafts_of_a_script(scripted: Path) -> None:
    # Drafts beyond the stop token follow no script and are not asked for.
    count = length_of(FIRST) - 4
    text = decode_with_drafts(Oracle(scripted), prompt_of(scripted, ASKED), count, steps=3)
    assert set(text.accepted) == {3}


def test_parsers_take_it_back() -> None:
    said = FIRST.removesuffix("<|observation|>")
    reasoning, answer = ReasoningParser("glm45", stream_reasoning=False).parse_non_stream(
        "<think>" + said
    )
    assert reasoning == REASONING
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    result = Glm47MoeDetector().detect_and_parse(answer, [Tool(**tool)])
    assert result.normal_text == "Let me look."
    assert json.loads(result.calls[0].parameters) == {"city": "Paris", "days": 2}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (("no reasoning is closed",), r"expected reasoning, </think>, and the answer"),
        (("y a b c d y a b c e</think>Yes.",), r"continues .* in two ways"),
        (("Why.</think>A", "Why not.</think>B"), r"continues .* in two ways"),
        # As many different characters as it takes to run out of codes.
        (("abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 2 + "</think>",), "script"),
        (("".join(chr(0x4E00 + 97 * i) for i in range(60)) + "</think>x",), "different tokens"),
        (("a</think>b", "c</think>d", "e</think>f"), "at most two texts"),
    ],
)
def test_script_refuses(tmp_path: Path, script: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        write_checkpoint(dataclasses.replace(SPEC, script=script), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_cli_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["checkpoint", str(tmp_path / "x"), "--layers", "1", "--first-k-dense-replace", "1"]
    assert main([*arguments, "--script-after-tool", SECOND]) == 1
    assert "needs --script" in capsys.readouterr().err
    assert main([*arguments, "--script", FIRST, "--script-after-tool", SECOND]) == 0
    manifest = read_manifest(tmp_path / "x")
    assert manifest is not None
    assert manifest["spec"]["script"] == [FIRST, SECOND]
    # The script does not ask for an MTP layer.
    assert manifest["spec"]["num_nextn_predict_layers"] == 0
