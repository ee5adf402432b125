"""What a synthetic ``glm_moe_dsa`` checkpoint looks like: every dimension, with its checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_glm.config import IndexerType


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Shape and content of one synthetic checkpoint; names are those of ``config.json``.

    The defaults keep every structural feature of GLM-5.2 (three dense-then-MoE phases apart, full
    and shared index layers with freq 4 and offset 3, a 512 + 64 latent, a 32 x 128 indexer) at a
    size that loads in a second.

    Attributes:
        index_topk: Positions each query attends to; small values make selection bite early.
        indexer_types: Per-layer ``full``/``shared``; ``None`` derives it from ``index_topk_freq``
            and ``index_skip_topk_offset``.
        num_nextn_predict_layers: MTP layers, written after the decoder layers; 0 or 1.
        nextn_embed_tokens: Also write ``embed_tokens`` under the MTP layer (a copy).
        nextn_shared_head: Also write ``shared_head.head`` under the MTP layer (a copy).
        mtp_perfect: ``hidden`` or ``attention`` construct an MTP layer that must predict exactly
            what the target does; see ``perfect_mtp``.
        script: What the target says after ``<think>``, and what it says there after a tool's
            response (by default the same). See ``script``.
        fp8: Store linear weights as e4m3 with one FP32 scale per 128 x 128 block.
        fp8_exclude: Parts kept in BF16 although ``fp8`` is set; see ``FP8_EXCLUDABLE``.
        rms_norm_eps: Of every RMSNorm, the two latent norms included.
        seed: Seed of all weights. Each tensor is seeded by its own name too, so that adding a
            layer leaves the others as they were.
    """

    num_hidden_layers: int = 8
    hidden_size: int = 256
    vocab_size: int = 1024
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    first_k_dense_replace: int = 2
    intermediate_size: int = 512
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    moe_intermediate_size: int = 128
    routed_scaling_factor: float = 2.5
    n_group: int = 1
    topk_group: int = 1
    index_topk: int = 64
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 3
    indexer_types: tuple[IndexerType, ...] | None = None
    num_nextn_predict_layers: int = 0
    nextn_embed_tokens: bool = False
    nextn_shared_head: bool = False
    mtp_perfect: Literal["no", "hidden", "attention"] = "no"
    script: tuple[str, ...] = ()
    fp8: bool = False
    fp8_exclude: tuple[str, ...] = ()
    max_position_embeddings: int = 32768
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        validate(self)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def is_constructed(self) -> bool:
        """Whether the target is built rather than drawn."""
        return self.mtp_perfect != "no" or bool(self.script)

    @property
    def layer_indexer_types(self) -> tuple[IndexerType, ...]:
        """``full`` or ``shared`` for each decoder layer (the MTP layer is always full)."""
        if self.indexer_types is not None:
            return self.indexer_types
        return tuple(
            "full"
            if max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0
            else "shared"
            for layer in range(self.num_hidden_layers)
        )

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder or MTP layer ``layer`` has routed experts."""
        return layer >= self.first_k_dense_replace

    def has_indexer(self, layer: int) -> bool:
        """Whether decoder or MTP layer ``layer`` owns indexer weights."""
        return layer >= self.num_hidden_layers or self.layer_indexer_types[layer] == "full"


FP8_EXCLUDABLE = ("attention", "indexer", "shared_experts", "nextn")
"""Parts that published FP8 checkpoints keep in BF16 in one variant or another."""


def validate(spec: CheckpointSpec) -> None:
    """Refuse a spec that no loader could serve.

    Args:
        spec: The spec to check.

    Raises:
        ValueError: Naming the field, the value and what would be accepted.
    """

    def require(ok: bool, field: str, expected: str) -> None:
        if not ok:
            got = getattr(spec, field)
            raise ValueError(f"checkpoint: {field} is {got!r}, expected {expected}")

    may_be_zero = {
        "first_k_dense_replace",
        "n_shared_experts",
        "num_nextn_predict_layers",
        "seed",
    }
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        floor = 0 if field.name in may_be_zero else 1
        if isinstance(value, int):
            require(value >= floor, field.name, f"an integer >= {floor}")
        else:
            require(value > 0, field.name, "a positive number")

    require(spec.num_nextn_predict_layers <= 1, "num_nextn_predict_layers", "0 or 1")
    require(spec.n_shared_experts >= 1, "n_shared_experts", "at least 1, as in every GLM-5.x")
    require(spec.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number")
    require(
        spec.index_head_dim >= spec.qk_rope_head_dim,
        "index_head_dim",
        f"at least qk_rope_head_dim = {spec.qk_rope_head_dim}",
    )
    require(
        spec.first_k_dense_replace <= spec.num_hidden_layers,
        "first_k_dense_replace",
        f"at most num_hidden_layers = {spec.num_hidden_layers}",
    )
    require(
        spec.num_experts_per_tok <= spec.n_routed_experts,
        "num_experts_per_tok",
        f"at most n_routed_experts = {spec.n_routed_experts}",
    )
    # Group scores are the sum of each group's two best experts.
    require(
        spec.n_routed_experts % spec.n_group == 0 and spec.n_routed_experts // spec.n_group >= 2,
        "n_group",
        f"a divisor of n_routed_experts = {spec.n_routed_experts} leaving 2 experts a group",
    )
    require(spec.topk_group <= spec.n_group, "topk_group", f"at most n_group = {spec.n_group}")
    require(
        spec.topk_group * (spec.n_routed_experts // spec.n_group) >= spec.num_experts_per_tok,
        "topk_group",
        f"groups holding at least num_experts_per_tok = {spec.num_experts_per_tok} experts",
    )

    types = spec.layer_indexer_types
    require(
        len(types) == spec.num_hidden_layers and set(types) <= {"full", "shared"},
        "indexer_types",
        f"{spec.num_hidden_layers} entries, each 'full' or 'shared'",
    )
    require(
        types[0] == "full",
        "indexer_types" if spec.indexer_types is not None else "index_skip_topk_offset",
        "a schedule whose layer 0 is full (a shared layer needs an earlier selection)",
    )
    unknown = sorted(set(spec.fp8_exclude) - set(FP8_EXCLUDABLE))
    require(not unknown, "fp8_exclude", f"parts among {FP8_EXCLUDABLE}")
    require(spec.fp8 or not spec.fp8_exclude, "fp8_exclude", "to be empty unless fp8 is set")
    if spec.num_nextn_predict_layers == 0:
        require(not spec.nextn_embed_tokens, "nextn_embed_tokens", "False without an MTP layer")
        require(not spec.nextn_shared_head, "nextn_shared_head", "False without an MTP layer")
    require(
        spec.mtp_perfect in ("no", "hidden", "attention"),
        "mtp_perfect",
        "'no', 'hidden' or 'attention'",
    )
    require(len(spec.script) <= 2, "script", "at most two texts")
    if spec.mtp_perfect != "no":
        require(
            spec.num_nextn_predict_layers == 1,
            "num_nextn_predict_layers",
            "1 for a constructed MTP layer",
        )
    if spec.is_constructed:
        _validate_constructed(spec, require)


def _validate_constructed(spec: CheckpointSpec, require: Callable[[bool, str, str], None]) -> None:
    reason = "for a constructed model"
    require(not spec.fp8, "fp8", f"False {reason}: its weights do not survive 3 mantissa bits")
    for field, minimum in (
        ("hidden_size", 208),
        ("vocab_size", 64),
        ("num_attention_heads", 2),
        ("v_head_dim", 64),
        ("kv_lora_rank", 64),
        ("qk_rope_head_dim", 32),
        # Four positions cover the two that the target reads and both neighbours.
        ("index_topk", 4),
    ):
        require(getattr(spec, field) >= minimum, field, f"at least {minimum} {reason}")
