"""Dimensions of the tiny model."""

from __future__ import annotations

from sglang_glm.checkpoint.spec import CheckpointSpec

TINY = CheckpointSpec(
    num_hidden_layers=5,
    hidden_size=256,
    vocab_size=896,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    first_k_dense_replace=2,
    intermediate_size=256,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    index_topk=64,
    num_nextn_predict_layers=1,
    max_position_embeddings=16384,
    rope_theta=10_000.0,
)
"""Full index layers 0, 1, 2 and shared ones 3, 4, as GLM-5.2 begins; 7.9 million parameters.

``rope_theta`` is lower than GLM's: at 1e6 most pairs hardly turn within 8,192 positions.
"""
