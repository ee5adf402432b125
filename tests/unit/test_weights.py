"""A checkpoint's tensors on their way into the model (T38).

test_complete              a whole checkpoint passes, for target and MTP layer, in BF16 and FP8
test_exclusion_lists       parts kept in BF16, in every combination that released checkpoints use
test_copies_of_embedding*  the MTP layer's own embedding or head belongs to the draft
test_dequantized           FP8 blocks leave the stream as code times scale
test_scale_before_weight   the order of a file does not matter
test_stacked_experts       transformers' two stacked expert tensors count for all of them
test_refused               each damage is refused by the tensor's name
test_fp8_without_scale     codes that nothing scales are refused, not taken as values
test_fp8_with_one_scale*   and so is one scale for a whole tensor
test_not_finite            NaN and infinity, where the CPU serves
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sglang_glm.checkpoint.fp8 import dequantize_blocks
from sglang_glm.config import GlmDsaConfig
from sglang_glm.models.weights import CheckpointStream, required_tensors
from tests.support.checkpoints import checkpoint

SMALL = ("--layers", "4", "--experts", "4", "--hidden-size", "256")


def load(directory: str) -> tuple[GlmDsaConfig, dict[str, torch.Tensor]]:
    config = GlmDsaConfig.from_hf(json.loads((Path(directory) / "config.json").read_text()))
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return config, tensors


@pytest.fixture(scope="module")
def bf16() -> tuple[GlmDsaConfig, dict[str, torch.Tensor]]:
    return load(checkpoint("--mtp", *SMALL))


@pytest.fixture(scope="module")
def fp8() -> tuple[GlmDsaConfig, dict[str, torch.Tensor]]:
    return load(checkpoint("--mtp", "--fp8", *SMALL))


def passed(
    config: GlmDsaConfig, tensors: dict[str, torch.Tensor], **options: object
) -> dict[str, torch.Tensor]:
    stream = CheckpointStream(config, **{"is_nextn": False, **options})
    out = dict(stream.check(tensors.items()))
    stream.check_complete()
    return out


@pytest.mark.parametrize("is_nextn", [False, True])
def test_complete(bf16, fp8, is_nextn: bool) -> None:
    config, tensors = bf16
    assert passed(config, tensors, is_nextn=is_nextn).keys() == tensors.keys()
    config, tensors = fp8
    names = passed(config, tensors, is_nextn=is_nextn, dequantize_to=torch.float32).keys()
    assert names == {name for name in tensors if not name.endswith("weight_scale_inv")}


@pytest.mark.parametrize("extra", ["--mtp-embed-tokens", "--mtp-shared-head"])
def test_copies_of_embedding_and_head(extra: str) -> None:
    config, tensors = load(checkpoint("--mtp", extra, *SMALL))
    assert (
        len(tensors)
        == len(required_tensors(config, is_nextn=False) | required_tensors(config, is_nextn=True))
        + 1
    )
    passed(config, tensors, is_nextn=True)


@pytest.mark.parametrize(
    "excluded",
    [
        ("indexer",),
        ("shared_experts",),
        ("nextn",),
        ("attention",),
        ("indexer", "shared_experts", "nextn"),
    ],
    ids="+".join,
)
def test_exclusion_lists(excluded: tuple[str, ...]) -> None:
    options = [part for name in excluded for part in ("--fp8-exclude", name)]
    config, tensors = load(checkpoint("--mtp", "--fp8", *options, *SMALL))
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    out = passed(config, tensors, dequantize_to=torch.bfloat16)
    for name, tensor in out.items():
        assert tensor.dtype != torch.float8_e4m3fn, name
        if tensors[name].dtype != torch.float8_e4m3fn:
            assert torch.equal(tensor, tensors[name]), name


def test_dequantized(fp8) -> None:
    config, tensors = fp8
    name = "model.layers.0.self_attn.o_proj.weight"
    out = passed(config, tensors, dequantize_to=torch.float32)[name]
    assert torch.equal(out, dequantize_blocks(tensors[name], tensors[f"{name}_scale_inv"]))
    assert out.std() > 0


def test_scale_before_weight(fp8) -> None:
    config, tensors = fp8
    backwards = dict(reversed(tensors.items()))
    forwards = passed(config, tensors, dequantize_to=torch.float32)
    assert all(
        torch.equal(t, forwards[n])
        for n, t in passed(config, backwards, dequantize_to=torch.float32).items()
    )


def test_stacked_experts(bf16) -> None:
    config, tensors = bf16
    stacked = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers + 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: torch.stack([tensors[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(4)])
            for kind in ("gate", "up", "down")
        }
        stacked[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        stacked[f"{prefix}.down_proj"] = parts["down"]
    passed(config, stacked)
    name = f"model.layers.{config.first_k_dense_replace}.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=rf"{name} is \[3, .*expected \[4, "):
        passed(config, stacked | {name: stacked[name][:3]})
    with pytest.raises(ValueError, match=rf"{name} is torch.int8, expected one of torch.bfloat16"):
        passed(config, stacked | {name: stacked[name].to(torch.int8)})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.down_proj belongs to no part"):
        passed(config, {"model.layers.0.mlp.experts.down_proj": torch.ones(4, 2, 2)})
    del stacked[f"model.layers.{config.first_k_dense_replace}.mlp.experts.down_proj"]
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight and 3 more is missing"):
        passed(config, stacked)


DAMAGES = {
    "missing": (
        lambda t: t.pop("model.layers.1.self_attn.indexer.wk.weight"),
        "indexer.wk.weight is missing",
    ),
    "unknown": (
        lambda t: t.update({"model.layers.9.extra.weight": torch.ones(2)}),
        "model.layers.9.extra.weight",
    ),
    "indexer on a shared layer": (
        lambda t: t.update({"model.layers.3.self_attn.indexer.wk.weight": torch.ones(128, 256)}),
        "model.layers.3.self_attn.indexer.wk.weight",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        r"model.norm.weight is \[3\], expected \[256\]",
    ),
    "dtype": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
        "lm_head.weight is torch.int8, expected one of torch.bfloat16",
    ),
    "awq": (lambda t: t.update({"model.layers.0.self_attn.o_proj.qweight": torch.ones(2)}), "AWQ"),
    "w4a8": (
        lambda t: t.update({"model.layers.0.self_attn.o_proj.weight_packed": torch.ones(2)}),
        "4-bit",
    ),
    "rotated MTP": (lambda t: t.update({"rot.weight": torch.ones(2)}), "rot.weight"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_refused(bf16, name: str) -> None:
    config, tensors = bf16
    damage, message = DAMAGES[name]
    damaged = dict(tensors)
    damage(damaged)
    with pytest.raises(ValueError, match=message):
        passed(config, damaged)


def test_fp8_without_scale(fp8) -> None:
    config, tensors = fp8
    damaged = dict(tensors)
    del damaged["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    with pytest.raises(ValueError, match=r"o_proj\.weight has no scale"):
        passed(config, damaged, dequantize_to=torch.float32)


def test_fp8_with_one_scale_a_tensor(fp8) -> None:
    config, tensors = fp8
    damaged = tensors | {"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(())}
    with pytest.raises(ValueError, match=r"o_proj\.weight: .*scale is \[\].*one scale a block"):
        passed(config, damaged, dequantize_to=torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(bf16, fp8, value: float) -> None:
    for (config, tensors), name in (
        (bf16, "model.norm.weight"),
        (bf16, "model.layers.1.self_attn.o_proj.weight"),
        (fp8, "model.layers.1.self_attn.o_proj.weight_scale_inv"),
    ):
        damaged = tensors | {name: tensors[name].clone()}
        damaged[name].view(-1)[-1] = value
        with pytest.raises(ValueError, match=r"\.weight holds NaN or infinity"):
            passed(config, damaged, dequantize_to=torch.float32)
        # Where SGLang keeps FP8 the values are not looked at.
        passed(config, damaged)
