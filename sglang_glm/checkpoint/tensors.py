"""The table of a checkpoint's tensors: name, shape, and how each is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_glm.checkpoint.spec import CheckpointSpec
    from sglang_glm.config import GlmDsaConfig

Kind = Literal["linear", "embedding", "norm", "shift", "router_bias"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the checkpoint.

    Attributes:
        name: Full name in the safetensors files.
        shape: Its shape; linear weights are ``[out_features, in_features]``.
        kind: ``linear`` is drawn with standard deviation ``gain / sqrt(in_features)``,
            ``embedding`` and ``router_bias`` and ``shift`` with ``gain``, ``norm`` uniformly in
            ``1 +- gain``.
        gain: See ``kind``.
        tail: Rows at the end of a linear weight that have a gain of their own, and that gain.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "linear"
    gain: float = 1.0
    tail: tuple[int, float] | None = None


# The gains make every part of the model visible in the logits without making the model
# chaotic. Each residual branch adds a tenth or so of the stream, so that dropping the
# indexer, the router's bias or the 2.5 moves log-probabilities by tenths, while FP32
# noise stays near 1e-6 and one position more or less in a selection costs little.
# The latents and index keys are small before their norms, as in trained models:
# otherwise a norm's epsilon would have no effect that a test could see.
_QUERY_GAIN = 1.5
_OUTPUT_GAIN = 0.1
_LATENT_GAIN = 0.1
_INDEX_KEY_GAIN = 0.05
_DENSE_DOWN_GAIN = 0.2
_EXPERT_DOWN_GAIN = 0.05
_ROUTER_BIAS_STD = 0.15
_HEAD_GAIN = 0.7
_NORM_SPREAD = 0.5


def _norm(name: str, width: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", shape=(width,), kind="norm", gain=_NORM_SPREAD)


def _linear(
    name: str,
    out_features: int,
    in_features: int,
    gain: float = 1.0,
    tail: tuple[int, float] | None = None,
) -> TensorSpec:
    shape = (out_features, in_features)
    return TensorSpec(name=f"{name}.weight", shape=shape, gain=gain, tail=tail)


def _attention(spec: CheckpointSpec | GlmDsaConfig, prefix: str) -> Iterator[TensorSpec]:
    heads, hidden = spec.num_attention_heads, spec.hidden_size
    yield _linear(f"{prefix}.q_a_proj", spec.q_lora_rank, hidden, _LATENT_GAIN)
    yield _norm(f"{prefix}.q_a_layernorm", spec.q_lora_rank)
    yield _linear(f"{prefix}.q_b_proj", heads * spec.qk_head_dim, spec.q_lora_rank, _QUERY_GAIN)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa", spec.kv_lora_rank + spec.qk_rope_head_dim, hidden)
    yield _norm(f"{prefix}.kv_a_layernorm", spec.kv_lora_rank)
    yield _linear(
        f"{prefix}.kv_b_proj", heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank
    )
    yield _linear(f"{prefix}.o_proj", hidden, heads * spec.v_head_dim, _OUTPUT_GAIN)


def _indexer(spec: CheckpointSpec | GlmDsaConfig, prefix: str) -> Iterator[TensorSpec]:
    yield _linear(f"{prefix}.wq_b", spec.index_n_heads * spec.index_head_dim, spec.q_lora_rank)
    yield _linear(f"{prefix}.wk", spec.index_head_dim, spec.hidden_size, _INDEX_KEY_GAIN)
    yield _norm(f"{prefix}.k_norm", spec.index_head_dim)
    yield TensorSpec(
        name=f"{prefix}.k_norm.bias", shape=(spec.index_head_dim,), kind="shift", gain=0.3
    )
    yield _linear(f"{prefix}.weights_proj", spec.index_n_heads, spec.hidden_size)


def _mlp(prefix: str, hidden: int, width: int, down_gain: float) -> Iterator[TensorSpec]:
    yield _linear(f"{prefix}.gate_proj", width, hidden)
    yield _linear(f"{prefix}.up_proj", width, hidden)
    yield _linear(f"{prefix}.down_proj", hidden, width, down_gain)


def _moe(spec: CheckpointSpec | GlmDsaConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, width = spec.hidden_size, spec.moe_intermediate_size
    yield _linear(f"{prefix}.gate", spec.n_routed_experts, hidden)
    yield TensorSpec(
        name=f"{prefix}.gate.e_score_correction_bias",
        shape=(spec.n_routed_experts,),
        kind="router_bias",
        gain=_ROUTER_BIAS_STD,
    )
    yield from _mlp(
        f"{prefix}.shared_experts", hidden, width * spec.n_shared_experts, _DENSE_DOWN_GAIN
    )
    for expert in range(spec.n_routed_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width, _EXPERT_DOWN_GAIN)


def _layer(spec: CheckpointSpec | GlmDsaConfig, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}"
    yield _norm(f"{prefix}.input_layernorm", spec.hidden_size)
    yield from _attention(spec, f"{prefix}.self_attn")
    if spec.has_indexer(layer):
        yield from _indexer(spec, f"{prefix}.self_attn.indexer")
    yield _norm(f"{prefix}.post_attention_layernorm", spec.hidden_size)
    if spec.is_moe_layer(layer):
        yield from _moe(spec, f"{prefix}.mlp")
    else:
        yield from _mlp(f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size, _DENSE_DOWN_GAIN)


def _embedding(spec: CheckpointSpec | GlmDsaConfig, name: str) -> TensorSpec:
    return TensorSpec(
        name=f"{name}.weight", shape=(spec.vocab_size, spec.hidden_size), kind="embedding"
    )


def _head(spec: CheckpointSpec | GlmDsaConfig, name: str) -> TensorSpec:
    return _linear(name, spec.vocab_size, spec.hidden_size, _HEAD_GAIN)


def model_tensors(spec: CheckpointSpec | GlmDsaConfig) -> Iterator[TensorSpec]:
    """List the tensors that a model of these dimensions consists of.

    Args:
        spec: Dimensions, of a checkpoint to write or of one to load.

    Yields:
        One entry per BF16 tensor: embedding, decoder layers, final norm, head, then the MTP layer
        under ``model.layers.{num_hidden_layers}``.
    """
    yield _embedding(spec, "model.embed_tokens")
    for layer in range(spec.num_hidden_layers):
        yield from _layer(spec, layer)
    yield _norm("model.norm", spec.hidden_size)
    yield _head(spec, "lm_head")
    if spec.num_nextn_predict_layers:
        layer = spec.num_hidden_layers
        prefix = f"model.layers.{layer}"
        yield _norm(f"{prefix}.enorm", spec.hidden_size)
        yield _norm(f"{prefix}.hnorm", spec.hidden_size)
        yield _linear(f"{prefix}.eh_proj", spec.hidden_size, 2 * spec.hidden_size)
        yield from _layer(spec, layer)
        yield _norm(f"{prefix}.shared_head.norm", spec.hidden_size)


def iter_tensors(spec: CheckpointSpec) -> Iterator[TensorSpec]:
    """List the tensors of a checkpoint in the order they are written.

    Args:
        spec: Dimensions of the checkpoint, and the copies that it carries.

    Yields:
        One entry per BF16 tensor (FP8 scales are added by the writer): those of the model, then
        the MTP layer's copies of embedding and head.
    """
    yield from model_tensors(spec)
    prefix = f"model.layers.{spec.num_hidden_layers}"
    if spec.nextn_embed_tokens:
        yield _embedding(spec, f"{prefix}.embed_tokens")
    if spec.nextn_shared_head:
        yield _head(spec, f"{prefix}.shared_head.head")
