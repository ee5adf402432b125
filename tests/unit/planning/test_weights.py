"""The weight table.

- sharded parts add up to the whole, replicated ones do not shrink
- exclusion lists change the bytes of exactly the named modules
- transformers' own model has the same number of parameters (an independent count)
"""

import dataclasses

import pytest
import torch
import transformers

from sglang_glm.config import GlmDsaConfig
from sglang_glm.planning import weights
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import RELEASED, load_config

GLM = load_config("zai-org/GLM-5.3")

TINY = RELEASED["zai-org/GLM-5.2"] | {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "intermediate_size": 384,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 8,
}


def test_released_checkpoints_differ_in_storage_only():
    bf16 = load_config("zai-org/GLM-5.3-BF16")
    assert weights.checkpoint_precision(GLM) == "fp8"
    assert weights.checkpoint_precision(bf16) == "bf16"
    assert weights.parameters_by_group(bf16) == weights.parameters_by_group(GLM)
    # Router biases are FP32 in both.
    biases = 76 * 256
    total = sum(weights.parameters_by_group(bf16).values())
    assert weights.checkpoint_bytes(bf16, "bf16") == 2 * total + 2 * biases


@pytest.mark.parametrize(
    ("method", "block"), [("compressed-tensors", None), ("fp8", None), ("fp8", (64, 64))]
)
def test_unknown_storage_is_refused(method, block):
    config = dataclasses.replace(GLM, quant_method=method, weight_block_size=block)
    with pytest.raises(ValueError, match="--weights bf16 or fp8"):
        weights.checkpoint_precision(config)


@pytest.mark.parametrize(
    ("entry", "modules"),
    [
        ("lm_head", set()),
        ("model.layers.5.self_attn", {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj",
                                      "o_proj"}),
        ("model.layers.5.mlp.experts.0.gate_proj", {"gate_proj"}),
        (r"re:model\.layers\.5\..*shared_experts.*", {"gate_proj", "up_proj", "down_proj"}),
        ("model.layers.55", set()),
    ],
)  # fmt: skip
def test_exclusions_change_the_named_modules_only(entry, modules):
    config = dataclasses.replace(GLM, modules_not_quantized=(entry,))
    changed = {
        weight.name.rsplit(".", 1)[-1]
        for weight in weights.iter_weights(GLM)
        if weight.layer_id == 5 and weights.effective_storage(weight, config) != weight
    }
    assert changed == modules


def test_excluded_module_is_stored_in_bf16():
    config = dataclasses.replace(GLM, modules_not_quantized=("model.layers.5.self_attn.o_proj",))
    blocks = 6144 // 128 * (64 * 256) // 128
    growth = weights.checkpoint_bytes(config, "fp8") - weights.checkpoint_bytes(GLM, "fp8")
    assert growth == 6144 * 64 * 256 - 4 * blocks


LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp_size=8),
    ParallelLayout(tp_size=8, ep_size=8),
    ParallelLayout(tp_size=8, ep_size=2),
    ParallelLayout(tp_size=8, attn_dp_size=2, ep_size=4),
    ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all"),
    ParallelLayout(tp_size=16, attn_dp_size=8, ep_size=16, moe_dispatch="all_to_all"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_parts_add_up(layout, precision):
    per_gpu = weights.weight_bytes_per_gpu(GLM, layout, precision)
    whole = weights.weight_bytes_per_gpu(GLM, ParallelLayout(), precision)
    assert per_gpu["routed_experts"] * layout.tp_size == whole["routed_experts"]
    assert per_gpu["dense_mlp"] * layout.tp_size == whole["dense_mlp"]
    assert per_gpu["shared_experts"] * layout.shared_experts_tp_size == whole["shared_experts"]
    assert per_gpu["embedding"] * layout.attn_tp_size == whole["embedding"]
    assert per_gpu["lm_head"] * layout.tp_size == whole["lm_head"]
    for replicated in ("indexer", "router", "norms", "mtp_projection"):
        assert per_gpu[replicated] == whole[replicated]
    absorbed = weights.absorbed_bytes_per_gpu(GLM, layout)
    assert absorbed * layout.attn_tp_size == 2 * 79 * 64 * (192 + 256) * 512


def test_attention_under_tp_keeps_the_latent_projections_whole():
    per_gpu = weights.weight_bytes_per_gpu(GLM, ParallelLayout(tp_size=8), "bf16")["attention"]
    split, whole = 33.554432e6 + 14.680064e6 + 100.663296e6, 16.121856e6
    assert per_gpu == 2 * 79 * (split / 8 + whole)


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "rows_per_gpu"),
    [(154_880, 8, 19_360), (1000, 8, 128), (1000, 3, 384), (960, 3, 320), (64, 1, 64)],
)
def test_vocabulary_padding(vocab_size, tp_size, rows_per_gpu):
    config = dataclasses.replace(GLM, vocab_size=vocab_size)
    layout = ParallelLayout(tp_size=tp_size)
    per_gpu = weights.shard(next(weights.iter_weights(config)), layout)
    assert per_gpu.rows == rows_per_gpu


@pytest.mark.parametrize("change", [{}, {"n_shared_experts": 2}, {"first_k_dense_replace": 8}])
def test_transformers_counts_the_same_parameters(change):
    content = TINY | change
    with torch.device("meta"):
        model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**content))
    theirs = sum(parameter.numel() for parameter in model.parameters())
    # transformers keeps the router's correction bias as a buffer.
    theirs += sum(
        buffer.numel()
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    )
    config = GlmDsaConfig.from_hf(content)
    assert sum(weights.parameters_by_group(config, with_mtp=False).values()) == theirs
