"""``config.json`` and ``generation_config.json`` of a synthetic checkpoint.

The keys are those of the released GLM-5.2 config, so that SGLang, transformers and this package
read one file. transformers has defaults for ``scoring_func``, ``topk_method``, ``moe_layer_freq``
and the RoPE layouts in code and does not write them; SGLang reads them from the file, and without
``indexer_rope_interleave`` it would rotate index keys in the half-split layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_glm.checkpoint.fp8 import quantization_config

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec
    from sglang_glm.checkpoint.tokenizer import SpecialIds

ARCHITECTURE = "GlmMoeDsaForCausalLM"


def build_config(spec: CheckpointSpec, ids: SpecialIds) -> dict[str, Any]:
    """Build the model config.

    Args:
        spec: Dimensions of the checkpoint.
        ids: Token ids that the config names.

    Returns:
        A JSON-serialisable dict.
    """
    num_dense = spec.first_k_dense_replace
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_nextn_predict_layers": spec.num_nextn_predict_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_attention_heads,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "qk_head_dim": spec.qk_head_dim,
        "v_head_dim": spec.v_head_dim,
        "head_dim": spec.qk_rope_head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "index_topk": spec.index_topk,
        "index_n_heads": spec.index_n_heads,
        "index_head_dim": spec.index_head_dim,
        "index_topk_freq": spec.index_topk_freq,
        "index_topk_pattern": None,
        "index_skip_topk_offset": spec.index_skip_topk_offset,
        "indexer_types": list(spec.layer_indexer_types),
        "index_share_for_mtp_iteration": True,
        "first_k_dense_replace": num_dense,
        "mlp_layer_types": ["dense"] * num_dense
        + ["sparse"] * (spec.num_hidden_layers - num_dense),
        "moe_layer_freq": 1,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "n_routed_experts": spec.n_routed_experts,
        "n_shared_experts": spec.n_shared_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "n_group": spec.n_group,
        "topk_group": spec.topk_group,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": spec.routed_scaling_factor,
        "ep_size": 1,
        "pretraining_tp": 1,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": list(ids.stop),
        "pad_token_id": ids.endoftext,
    }
    if spec.fp8:
        config["quantization_config"] = quantization_config(spec)
    return config


def build_generation_config(ids: SpecialIds) -> dict[str, Any]:
    """Build ``generation_config.json``: the stop tokens and GLM's sampling defaults.

    Args:
        ids: Token ids that the config names.

    Returns:
        A JSON-serialisable dict.
    """
    return {
        "_from_model_config": True,
        "eos_token_id": list(ids.stop),
        "pad_token_id": ids.endoftext,
        "temperature": 1.0,
        "top_p": 0.95,
    }
