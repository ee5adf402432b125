"""Released checkpoints, known by name so that a plan needs no network.

Only the fields that `GlmDsaConfig` reads are kept. Sources: the public config.json of each
repository; GLM-5.2 and 5.3 share one structure and differ in training and storage, GLM-5 and 5.1
have an indexer in every layer.
"""

from __future__ import annotations

import json
from pathlib import Path

from sglang_glm.config import GlmDsaConfig

_GLM_5: dict[str, object] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rms_norm_eps": 1e-05,
}

_GLM_5_2 = _GLM_5 | {
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}

_FP8: dict[str, object] = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}

RELEASED: dict[str, dict[str, object]] = {
    "zai-org/GLM-5": _GLM_5,
    "zai-org/GLM-5-FP8": _GLM_5 | _FP8,
    "zai-org/GLM-5.1": _GLM_5,
    "zai-org/GLM-5.1-FP8": _GLM_5 | _FP8,
    "zai-org/GLM-5.2": _GLM_5_2,
    "zai-org/GLM-5.2-FP8": _GLM_5_2 | _FP8,
    "zai-org/GLM-5.3": _GLM_5_2 | _FP8,
    "zai-org/GLM-5.3-BF16": _GLM_5_2,
}
"""GLM-5.3 is released in FP8 under its plain name, its predecessors in BF16."""


def load_config(model: str) -> GlmDsaConfig:
    """Facts of a released model by name, of a checkpoint folder, or of a config.json.

    Args:
        model: A key of `RELEASED`, a folder holding `config.json`, or the path of one.

    Raises:
        ValueError: If it is none of these, or a config that cannot be served.
    """
    if model in RELEASED:
        return GlmDsaConfig.from_hf(RELEASED[model])
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"plan: model is {model!r}, expected a config.json, a checkpoint folder or one of "
            f"{', '.join(RELEASED)}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"plan: {path} is not valid JSON ({error}); pass a config.json") from error
    return GlmDsaConfig.from_hf(content)
