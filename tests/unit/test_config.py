"""Config facts and refusals.

Matrix:
- released values of GLM-5, 5.1, 5.2, 5.3 are accepted as they are, and give the known dimensions
- the three encodings of full/shared layers agree with each other, and with SGLang and transformers
- every refusal names its field
- fields that SGLang would default wrongly are reported
"""

import copy
import dataclasses
import types

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.configs.model_config import dsa_layer_skips_topk

from sglang_glm.config import GlmDsaConfig, fields_to_supply, resolve_indexer_types

FULL_LAYERS_OF_GLM_5_2 = (0, 1, 2, *range(6, 78, 4))

# The public config.json of GLM-5 and GLM-5.1; their IndexShare fields came with GLM-5.2.
GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

GLM_5_2 = GLM_5 | {
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": [
        "full" if layer_id in FULL_LAYERS_OF_GLM_5_2 else "shared" for layer_id in range(78)
    ],
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}

GLM_5_3 = GLM_5_2 | {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexer.weights_proj"],
    }
}


def without(config: dict, *names: str) -> dict:
    return {key: value for key, value in config.items() if key not in names}


@pytest.mark.parametrize(
    ("config", "num_full", "positions", "theta", "quant"),
    [
        pytest.param(GLM_5, 78, 202752, 1e6, None, id="GLM-5"),
        pytest.param(GLM_5_2, 21, 1048576, 8e6, None, id="GLM-5.2"),
        pytest.param(GLM_5_3, 21, 1048576, 8e6, "fp8", id="GLM-5.3"),
    ],
)
def test_released_configs_are_accepted(config, num_full, positions, theta, quant):
    facts = GlmDsaConfig.from_hf(config)
    assert len(facts.full_index_layer_ids) == num_full
    assert facts.max_position_embeddings == positions
    assert facts.rope_theta == theta
    assert facts.quant_method == quant
    assert (facts.num_dense_layers, facts.num_moe_layers, facts.mtp_layer_id) == (3, 75, 78)
    assert (facts.qk_head_dim, facts.latent_dim) == (256, 576)
    assert facts.softmax_scale == 0.0625
    assert fields_to_supply(config) == {}


def test_quantization_facts_are_kept():
    facts = GlmDsaConfig.from_hf(GLM_5_3)
    assert facts.weight_block_size == (128, 128)
    assert facts.modules_not_quantized == (
        "lm_head",
        "model.layers.0.self_attn.indexer.weights_proj",
    )


def test_objects_read_like_dictionaries():
    assert GlmDsaConfig.from_hf(types.SimpleNamespace(**GLM_5_2)) == GlmDsaConfig.from_hf(GLM_5_2)


def test_config_is_frozen_and_input_untouched():
    before = copy.deepcopy(GLM_5_3)
    facts = GlmDsaConfig.from_hf(GLM_5_3)
    assert before == GLM_5_3
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.index_topk = 1  # type: ignore[misc]


def test_full_layers_of_glm_5_2_in_three_encodings():
    listed = resolve_indexer_types(GLM_5_2)
    by_freq = resolve_indexer_types(without(GLM_5_2, "indexer_types"))
    letters = "".join("F" if kind == "full" else "S" for kind in listed)
    by_pattern = resolve_indexer_types(
        without(GLM_5_2, "indexer_types") | {"index_topk_pattern": letters, "index_topk_freq": 1}
    )
    assert listed == by_freq == by_pattern
    assert GlmDsaConfig.from_hf(GLM_5_2).full_index_layer_ids == FULL_LAYERS_OF_GLM_5_2


def test_offset_is_two_when_absent():
    config = without(GLM_5_2, "indexer_types", "index_skip_topk_offset") | {
        "num_hidden_layers": 8,
        "mlp_layer_types": None,
    }
    kinds = resolve_indexer_types(config)
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [0, 1, 5]


def test_listed_types_may_be_longer_than_a_reduced_model():
    facts = GlmDsaConfig.from_hf(GLM_5_2 | {"num_hidden_layers": 7})
    assert facts.full_index_layer_ids == (0, 1, 2, 6)
    assert facts.num_moe_layers == 4
    assert facts.mtp_layer_id == 7


def test_index_source_and_mtp_layer():
    facts = GlmDsaConfig.from_hf(GLM_5_2)
    assert [facts.index_source_layer_id(i) for i in (0, 2, 5, 6, 9, 77, 78)] == [
        0,
        2,
        2,
        6,
        6,
        74,
        78,
    ]
    assert [facts.has_indexer(i) for i in (2, 3, 77, 78)] == [True, False, False, True]
    assert [facts.is_moe_layer(i) for i in (2, 3, 78)] == [False, True, True]
    with pytest.raises(ValueError, match=r"layer_id is 79.*< 79"):
        facts.index_source_layer_id(79)
    without_mtp = GlmDsaConfig.from_hf(GLM_5_2 | {"num_nextn_predict_layers": 0})
    assert without_mtp.mtp_layer_id is None
    with pytest.raises(ValueError, match="layer_id is 78"):
        without_mtp.has_indexer(78)


@given(
    num_layers=st.integers(1, 40),
    freq=st.integers(1, 9),
    offset=st.none() | st.integers(1, 12),
)
def test_every_shared_layer_has_the_nearest_earlier_source(num_layers, freq, offset):
    config = without(GLM_5, "first_k_dense_replace") | {
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": 0,
        "index_topk_freq": freq,
        "index_skip_topk_offset": offset,
    }
    facts = GlmDsaConfig.from_hf(config)
    last_full = None
    for layer_id, kind in enumerate(facts.indexer_types):
        last_full = layer_id if kind == "full" else last_full
        assert facts.index_source_layer_id(layer_id) == last_full


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "glm4_moe"}, "model_type is 'glm4_moe'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "architectures is"),
        ({"index_topk": None}, "index_topk is None"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"index_topk": "2048"}, "index_topk is '2048'"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"n_shared_experts": None}, "n_shared_experts is None"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor is -1"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ({"index_kpool": 4}, "index_kpool is 4"),
        ({"indexer_types": ["full"] * 77}, "indexer_types is '77 entries'"),
        ({"indexer_types": ["shared"] + ["full"] * 77}, "'shared' at layer 0"),
        ({"indexer_types": ["full"] * 77 + ["Shared"]}, r"indexer_types\[77\] is 'Shared'"),
        ({"indexer_types": "full"}, "indexer_types is 'full'"),
        ({"indexer_types": None, "index_topk_pattern": "F" * 77}, "index_topk_pattern is"),
        ({"indexer_types": None, "index_topk_pattern": "S" * 78}, "index_topk_pattern is"),
        (
            {"indexer_types": None, "index_topk_pattern": ["full"] * 78},
            r"index_topk_pattern\[0\] is 'full'",
        ),
        ({"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"indexer_types": None, "index_skip_topk_offset": 0}, "index_skip_topk_offset is 0"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"first_k_dense_replace": 79}, "first_k_dense_replace is 79"),
        ({"qk_rope_head_dim": 192, "qk_head_dim": None}, "qk_rope_head_dim is 192"),
        ({"qk_rope_head_dim": 63, "qk_head_dim": None}, "qk_rope_head_dim is 63"),
        ({"qk_head_dim": 192}, "qk_head_dim is 192"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"n_group": 3}, "n_group is 3"),
        ({"topk_group": 2}, "n_group is 1"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
        ({"n_group": 64, "num_experts_per_tok": 8}, "num_experts_per_tok is 8"),
        ({"mlp_layer_types": ["dense"] * 78}, r"mlp_layer_types\[3\] is 'dense'"),
        ({"mlp_layer_types": ["dense"] * 3}, r"mlp_layer_types\[3\] is None"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
        ({"rope_parameters": None}, "rope_theta is None"),
        ({"quantization_config": {"fmt": "e4m3"}}, "quant_method is None"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size is",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": "lm_head"}},
            "modules_to_not_convert is 'lm_head'",
        ),
    ],
)
def test_refusals_name_the_field(change, message):
    GlmDsaConfig.from_hf(GLM_5_2)
    with pytest.raises(ValueError, match=message) as failure:
        GlmDsaConfig.from_hf(GLM_5_2 | change)
    assert "expected" in str(failure.value)


def test_old_style_rope_fields():
    config = without(GLM_5, "rope_parameters") | {"rope_theta": 1000000}
    assert GlmDsaConfig.from_hf(config).rope_theta == 1e6
    with pytest.raises(ValueError, match="rope_type is 'yarn'"):
        GlmDsaConfig.from_hf(config | {"rope_scaling": {"type": "yarn", "factor": 4}})


def test_fields_that_sglang_would_miss_are_reported():
    bare = without(
        GLM_5, "indexer_rope_interleave", "topk_method", "scoring_func", "moe_layer_freq"
    )
    assert GlmDsaConfig.from_hf(bare) == GlmDsaConfig.from_hf(GLM_5)
    assert fields_to_supply(bare) == {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "indexer_rope_interleave": True,
    }


SCHEDULES = [
    {},
    {"index_topk_freq": 4},
    {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    {"index_topk_freq": 3, "index_skip_topk_offset": 5},
    {"index_topk_pattern": "FFSFSSSFSSFF"},
    {"indexer_types": ["full", "shared", "shared", "full"] * 3},
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_sglang(schedule):
    config = GLM_5 | {"num_hidden_layers": 12} | schedule
    theirs = [
        dsa_layer_skips_topk(types.SimpleNamespace(**config), layer_id) for layer_id in range(12)
    ]
    assert [kind == "shared" for kind in resolve_indexer_types(config)] == theirs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_transformers(schedule):
    config = GLM_5 | {"num_hidden_layers": 12} | schedule
    theirs = transformers.GlmMoeDsaConfig(**config)
    assert list(resolve_indexer_types(config)) == theirs.indexer_types
    assert GlmDsaConfig.from_hf(theirs) == GlmDsaConfig.from_hf(config)


def test_bare_transformers_config_is_read_with_the_family_values():
    bare = transformers.GlmMoeDsaConfig()
    facts = GlmDsaConfig.from_hf(bare)
    assert (facts.num_hidden_layers, facts.mtp_layer_id) == (78, None)
    assert fields_to_supply(bare)["indexer_rope_interleave"] is True
