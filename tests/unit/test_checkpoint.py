"""The synthetic checkpoint: its files, its refusals, and that other readers accept them.

test_spec_refuses                     a dimension that no loader could serve is named
test_schedule_matches_glm52           full/shared layers as in the released 78-layer config
test_weights_depend_on_options_alone  same bytes twice; another seed or layer count elsewhere
test_weights_have_the_stated_spread   gain, mean and tail of each kind of tensor
test_weights_do_not_depend_on_the_chunk   large tensors are drawn in pieces
test_transformers_reads_the_config    every field survives GlmMoeDsaConfig
test_sglang_keys_are_in_config_json   fields for which SGLang's fallback would be wrong
test_tensor_names_are_transformers    names and shapes, experts included
test_nextn_names                      what SGLang's NextN loader looks for; optional copies
test_shards                           several files hold what one file held
test_rewrite                          unchanged, changed, foreign, forced, a file in the way
test_interrupted_write                a killed write leaves the old checkpoint and no litter
test_disk_too_small                   refused before writing
test_fp8_round_trip                   scale layout, edge blocks, error bound
test_fp8_list_agrees_with_files       a module is listed or has a scale, never both or neither
test_fp8_exclusions                   the parts that published variants keep in BF16
test_tokenizer                        text round trip, GLM's added tokens, stop ids
test_template_*                       GLM-5's prompt, and that SGLang's parsers take it back
test_cli_*                            every field has an option; errors are one line
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector
from sglang.srt.parser import template_detection as detection
from transformers import AutoConfig, AutoTokenizer, GlmMoeDsaForCausalLM

from sglang_glm.checkpoint import random_weights, writer
from sglang_glm.checkpoint.fp8 import dequantize_blocks, quantize_blocks
from sglang_glm.checkpoint.random_weights import draw_tensor
from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.tensors import TensorSpec, iter_tensors
from sglang_glm.checkpoint.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS
from sglang_glm.checkpoint.writer import read_manifest, write_checkpoint
from sglang_glm.cli import checkpoint as cli_checkpoint
from sglang_glm.cli.main import main
from sglang_glm.verification.hf_weights import read_weights, split_nextn, stack_experts

if TYPE_CHECKING:
    from pathlib import Path

SMALL = CheckpointSpec(
    num_hidden_layers=3,
    hidden_size=128,
    num_attention_heads=2,
    q_lora_rank=64,
    kv_lora_rank=128,
    n_routed_experts=4,
    moe_intermediate_size=64,
    intermediate_size=128,
    index_n_heads=4,
    first_k_dense_replace=1,
    indexer_types=("full", "shared", "full"),
    num_nextn_predict_layers=1,
)


def stored_dtypes(directory: Path) -> dict[str, torch.dtype]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "small"
    assert write_checkpoint(SMALL, directory)
    return directory


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"first_k_dense_replace": 9}, "first_k_dense_replace"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "n_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"indexer_types": ("full", "shared")}, "indexer_types"),
        ({"indexer_types": ("shared",) * 8}, "indexer_types"),
        ({"indexer_types": ("dense",) * 8}, "indexer_types"),
        ({"fp8_exclude": ("nextn",)}, "fp8_exclude"),
        ({"fp8": True, "fp8_exclude": ("norms",)}, "fp8_exclude"),
        ({"nextn_embed_tokens": True}, "nextn_embed_tokens"),
    ],
)
def test_spec_refuses(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint: {named} is .* expected"):
        CheckpointSpec(**change)


def test_schedule_matches_glm52() -> None:
    types = CheckpointSpec(num_hidden_layers=78).layer_indexer_types
    assert [i for i, kind in enumerate(types) if kind == "full"] == [0, 1, *range(2, 78, 4)]
    assert len(types) == 78


def test_weights_depend_on_options_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_checkpoint(SMALL, tmp_path / name)
    first, second = (read_manifest(tmp_path / name) for name in ("a", "b"))
    assert first is not None and first == second

    table = {tensor.name: tensor for tensor in iter_tensors(SMALL)}
    tensor = table["model.layers.1.self_attn.q_b_proj.weight"]
    taller = dataclasses.replace(SMALL, num_hidden_layers=4, indexer_types=("full",) * 4)
    assert torch.equal(draw_tensor(SMALL, tensor), draw_tensor(taller, tensor))
    reseeded = dataclasses.replace(SMALL, seed=1)
    assert not torch.equal(draw_tensor(SMALL, tensor), draw_tensor(reseeded, tensor))
    drawn = {draw_tensor(SMALL, tensor).double().sum().item() for tensor in table.values()}
    assert len(drawn) == len(table), "two tensors hold the same numbers"


def test_weights_have_the_stated_spread() -> None:
    linear = draw_tensor(SMALL, TensorSpec(name="x", shape=(256, 400), gain=3.0)).float()
    assert abs(linear.std().item() * 20 / 3 - 1) < 0.01
    assert abs(linear.mean().item()) < 0.003
    assert linear.abs().max().item() <= 3.4642 * 3 / 20 * 1.01

    tail = TensorSpec(name="x", shape=(256, 400), gain=1.0, tail=(56, 0.5))
    drawn = draw_tensor(SMALL, tail).float()
    assert abs(drawn[:200].std().item() * 20 - 1) < 0.01
    assert abs(drawn[200:].std().item() * 20 - 0.5) < 0.01

    norm = draw_tensor(SMALL, TensorSpec(name="x", shape=(4096,), kind="norm", gain=0.5)).float()
    assert 0.5 <= norm.min().item() < 0.51 and 1.49 < norm.max().item() <= 1.5

    bias = TensorSpec(name="x", shape=(256,), kind="router_bias", gain=0.15)
    assert draw_tensor(SMALL, bias).dtype == torch.float32


def test_weights_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TensorSpec(name="x", shape=(20, 11), gain=1.0, tail=(6, 0.5))
    whole = draw_tensor(SMALL, tensor)
    for chunk in (1, 7, 154, 160):
        monkeypatch.setattr(random_weights, "_CHUNK", chunk)
        assert torch.equal(draw_tensor(SMALL, tensor), whole)


def test_transformers_reads_the_config(small: Path) -> None:
    config = AutoConfig.from_pretrained(small)
    assert type(config).__name__ == "GlmMoeDsaConfig"
    written = json.loads((small / "config.json").read_text())
    for field in dataclasses.fields(SMALL):
        if field.name in written and field.name != "indexer_types":
            assert getattr(config, field.name) == getattr(SMALL, field.name), field.name
    assert tuple(config.indexer_types) == SMALL.layer_indexer_types
    assert config.mlp_layer_types == ["dense", "sparse", "sparse"]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": SMALL.rope_theta}


def test_sglang_keys_are_in_config_json(small: Path) -> None:
    written = json.loads((small / "config.json").read_text())
    assert written["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert written["indexer_rope_interleave"] is True
    assert written["rope_interleave"] is True
    assert written["topk_method"] == "noaux_tc"
    assert written["scoring_func"] == "sigmoid"
    assert written["moe_layer_freq"] == 1
    assert written["index_share_for_mtp_iteration"] is True
    assert written["dtype"] == "bfloat16"


def test_tensor_names_are_transformers(small: Path) -> None:
    config = AutoConfig.from_pretrained(small)
    with torch.device("meta"):
        expected = GlmMoeDsaForCausalLM(config).state_dict()
    target, _ = split_nextn(stack_experts(read_weights(small)), SMALL.num_hidden_layers)
    assert {name: tensor.shape for name, tensor in target.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


def test_nextn_names(small: Path, tmp_path: Path) -> None:
    _, nextn = split_nextn(read_weights(small), SMALL.num_hidden_layers)
    hidden = SMALL.hidden_size
    assert nextn["eh_proj.weight"].shape == (hidden, 2 * hidden)
    for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        assert nextn[name].shape == (hidden,)
    assert "self_attn.indexer.wq_b.weight" in nextn
    assert "mlp.experts.3.down_proj.weight" in nextn
    assert not {"embed_tokens.weight", "shared_head.head.weight"} & set(nextn)

    full = dataclasses.replace(SMALL, nextn_embed_tokens=True, nextn_shared_head=True)
    write_checkpoint(full, tmp_path / "full")
    target, nextn = split_nextn(read_weights(tmp_path / "full"), SMALL.num_hidden_layers)
    assert torch.equal(nextn["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(nextn["shared_head.head.weight"], target["lm_head.weight"])


def test_shards(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 500_000)
    calls: list[tuple[int, int]] = []
    write_checkpoint(
        SMALL, tmp_path / "x", progress=lambda done, total: calls.append((done, total))
    )
    files = sorted(path.name for path in (tmp_path / "x").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "x" / name).stat().st_size < 700_000 for name in files)
    one, many = read_weights(small), read_weights(tmp_path / "x")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert calls[-1][0] == calls[-1][1] and calls == sorted(calls)


def test_rewrite(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    assert write_checkpoint(SMALL, directory)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert not write_checkpoint(SMALL, directory)
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert write_checkpoint(dataclasses.replace(SMALL, index_topk=8), directory)
    assert json.loads((directory / "config.json").read_text())["index_topk"] == 8

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"foreign is not empty .* --force"):
        write_checkpoint(SMALL, foreign)
    assert (foreign / "thesis.txt").exists()
    assert write_checkpoint(SMALL, foreign, force=True)
    assert read_manifest(foreign) is not None and not (foreign / "thesis.txt").exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write_checkpoint(SMALL, tmp_path / "file", force=True)


def test_interrupted_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "x"
    write_checkpoint(SMALL, directory)
    before = read_manifest(directory)

    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(dataclasses.replace(SMALL, seed=5), directory)
    assert read_manifest(directory) == before
    assert (directory / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(RuntimeError, match=r"GB needed .* 0.00 GB free"):
        write_checkpoint(SMALL, tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(128, 128), (576, 256), (130, 7), (1, 300)])
def test_fp8_round_trip(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    # One block is a thousand times larger: a scale shared across blocks would lose the rest.
    weight = torch.randn(shape)
    weight[:128, :128] *= 1000
    codes, scale = quantize_blocks(weight)
    assert codes.shape == shape and codes.dtype == torch.float8_e4m3fn
    assert list(scale.shape) == [-(-shape[0] // 128), -(-shape[1] // 128)]
    back = dequantize_blocks(codes, scale)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = weight[row : row + 128, column : column + 128]
            error = (back[row : row + 128, column : column + 128] - block).abs()
            # Half a unit in the last place: 2^-4 of the value, or of the smallest normal number.
            floor = block.abs().amax() / 448 * 2.0**-10
            assert bool((error <= block.abs() * 2.0**-4 + floor).all())
    with pytest.raises(ValueError, match="scale is"):
        dequantize_blocks(codes, scale.repeat(2, 1))


def listed(directory: Path) -> set[str]:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    return set(config["modules_to_not_convert"])


@pytest.mark.parametrize("exclude", [(), ("indexer", "nextn"), ("attention", "shared_experts")])
def test_fp8_list_agrees_with_files(tmp_path: Path, exclude: tuple[str, ...]) -> None:
    directory = tmp_path / "x"
    write_checkpoint(dataclasses.replace(SMALL, fp8=True, fp8_exclude=exclude), directory)
    dtypes = stored_dtypes(directory)
    modules = listed(directory)
    for name, dtype in dtypes.items():
        if not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight").replace(".indexer.weights_proj", ".indexers_proj")
        quantized = dtype == torch.float8_e4m3fn
        assert quantized == (f"{name}_scale_inv" in dtypes), name
        assert quantized != (module in modules), name
    scales = [name for name in dtypes if name.endswith("_scale_inv")]
    assert scales and all(dtypes[name] == torch.float32 for name in scales)


def test_fp8_exclusions(tmp_path: Path) -> None:
    always_bf16 = (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.indexer.weights_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.0.input_layernorm.weight",
    )
    parts = {
        "attention": "model.layers.0.self_attn.kv_b_proj.weight",
        "indexer": "model.layers.0.self_attn.indexer.wk.weight",
        "shared_experts": "model.layers.1.mlp.shared_experts.up_proj.weight",
        "nextn": "model.layers.3.mlp.experts.0.up_proj.weight",
    }
    for excluded in (None, *parts):
        directory = tmp_path / str(excluded)
        fp8_exclude = () if excluded is None else (excluded,)
        write_checkpoint(dataclasses.replace(SMALL, fp8=True, fp8_exclude=fp8_exclude), directory)
        dtypes = stored_dtypes(directory)
        assert all(dtypes[name] == torch.bfloat16 for name in always_bf16)
        assert dtypes["model.layers.1.mlp.experts.0.up_proj.weight"] == torch.float8_e4m3fn
        for part, name in parts.items():
            expected = torch.bfloat16 if part == excluded else torch.float8_e4m3fn
            assert dtypes[name] == expected, (excluded, name)


def test_tokenizer(small: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small)
    assert len(tokenizer) == SMALL.vocab_size
    for text in (
        "Hello, world!",
        "今天天气很好。",
        " two  spaces\n\ttab",
        "🦊 ünïcödé",
        "\x00\x7f",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    # A repeated phrase of the corpus takes fewer tokens than bytes: merges were learned.
    assert len(tokenizer("the sequence").input_ids) <= 3

    ids = tokenizer.convert_tokens_to_ids([*CONTROL_TOKENS, *MARKUP_TOKENS])
    assert ids == list(range(SMALL.vocab_size - len(ids), SMALL.vocab_size))
    text = "".join([*CONTROL_TOKENS, *MARKUP_TOKENS])
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(MARKUP_TOKENS)

    config = json.loads((small / "config.json").read_text())
    stop = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids(stop)
    assert config["pad_token_id"] == tokenizer.pad_token_id
    with pytest.raises(ValueError, match="vocab_size is 270"):
        write_checkpoint(dataclasses.replace(SMALL, vocab_size=270), small.parent / "none")
    assert not (small.parent / "none").exists()


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "天气",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CALL = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
}
CALL_TEXT = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)


def render(directory: Path, messages: list[dict], **kwargs: object) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    kwargs = {"add_generation_prompt": True, **kwargs}
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def test_template_thinking_toggle(small: Path) -> None:
    user = [{"role": "user", "content": "Hi"}]
    prefix = "[gMASK]<sop><|user|>Hi<|assistant|>"
    assert render(small, user) == prefix + "<think>"
    assert render(small, user, enable_thinking=False) == prefix + "</think>"
    assert render(small, user, add_generation_prompt=False) == "[gMASK]<sop><|user|>Hi"
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    ]
    assert render(small, parts) == prefix + "<think>"


def test_template_history(small: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B", "reasoning_content": "old"},
        {"role": "user", "content": "C?"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]
    head = "[gMASK]<sop><|system|>Be brief.<|user|>A?<|assistant|>"
    tail = (
        "B<|user|>C?<|assistant|><think>new</think>" + CALL_TEXT + "<|observation|>"
        "<tool_response>sun</tool_response><tool_response>rain</tool_response>"
        "<|assistant|><think>"
    )
    assert render(small, messages) == head + "</think>" + tail
    kept = render(small, messages, clear_thinking=False)
    assert kept == head + "<think>old</think>" + tail
    # Reasoning left inside the content is found too.
    messages[2] = {"role": "assistant", "content": "<think>old</think>B"}
    assert render(small, messages) == head + "</think>" + tail


def test_template_tools(small: Path) -> None:
    text = render(small, [{"role": "user", "content": "Hi"}], tools=TOOLS)
    block = re.search(r"<\|system\|>.*<tools>\n(.*)\n</tools>", text, re.DOTALL)
    assert block is not None
    assert json.loads(block.group(1)) == TOOLS[0]["function"]
    assert "天气" in text and text.endswith("<|user|>Hi<|assistant|><think>")


def test_template_is_detected_by_sglang(small: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small)
    context = detection.TemplateDetectionContext(
        template=tokenizer.chat_template,
        reasoning_config=None,
        force_reasoning=False,
        vocab=set(tokenizer.get_vocab()),
    )

    def first(rules: tuple) -> object:
        return next((rule.value for rule in rules if rule.predicate(context)), None)

    toggle = first(detection.REASONING_MODE_RULES)
    assert toggle.toggle_param == "enable_thinking" and toggle.default_enabled is True
    context = dataclasses.replace(context, reasoning_config=toggle)
    assert first(detection.REASONING_PARSER_RULES) == "glm45"
    assert first(detection.TOOL_CALL_PARSER_RULES) == "glm47"


def test_template_call_is_parsed_by_sglang() -> None:
    result = Glm47MoeDetector().detect_and_parse(
        "Let me look." + CALL_TEXT, [Tool(**tool) for tool in TOOLS]
    )
    assert result.normal_text == "Let me look."
    (call,) = result.calls
    assert call.name == "get_weather"
    assert json.loads(call.parameters) == {"city": "Paris", "days": 2}


def test_cli_has_an_option_for_every_field() -> None:
    by_option = {field for _, field, _ in cli_checkpoint.DIMENSIONS}
    elsewhere = {
        "indexer_types",
        "num_nextn_predict_layers",
        "nextn_embed_tokens",
        "nextn_shared_head",
        "mtp_perfect",
        "script",
        "fp8",
        "fp8_exclude",
    }
    assert by_option | elsewhere == {field.name for field in dataclasses.fields(CheckpointSpec)}


def test_cli_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["checkpoint", str(tmp_path / "x"), "--layers", "2", "--hidden-size", "64"]
    arguments += ["--experts", "2", "--indexer-types", "full,shared", "--mtp", "--mtp-shared-head"]
    arguments += [
        "--fp8",
        "--fp8-exclude",
        "nextn",
        "--fp8-exclude",
        "indexer",
        "--index-topk",
        "2",
    ]
    assert main(arguments) == 0
    assert (
        "full index layers [0], index_topk 2, MTP layers 1, weights FP8" in capsys.readouterr().out
    )
    manifest = read_manifest(tmp_path / "x")
    assert manifest is not None
    assert manifest["spec"]["fp8_exclude"] == ["indexer", "nextn"]
    assert manifest["spec"]["nextn_shared_head"] is True
    assert main(arguments) == 0
    assert "already there" in capsys.readouterr().out


def test_cli_explains_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(tmp_path / "x"), "--index-head-dim", "8"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sglang-glm checkpoint: error: index_head_dim is 8")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit) as exit_info:
        main(["checkpoint", "--help"])
    assert exit_info.value.code == 0
    assert "examples:" in capsys.readouterr().out
