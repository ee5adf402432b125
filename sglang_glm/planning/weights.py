"""Every weight of the model as data: shape, storage, and how a layout splits it.

Parameter counts, bytes on disk, bytes per GPU, bytes read and FLOPs are all sums over this one
table. Shapes follow from `config.json`; the sharding is that of SGLang 0.5.23's DeepSeek-V2 and
NextN model classes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from sglang_glm.config import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.layout import ParallelLayout

WeightGroup = Literal[
    "attention",
    "indexer",
    "routed_experts",
    "shared_experts",
    "dense_mlp",
    "router",
    "norms",
    "embedding",
    "lm_head",
    "mtp_projection",
]
WEIGHT_GROUPS: tuple[WeightGroup, ...] = (
    "attention",
    "indexer",
    "routed_experts",
    "shared_experts",
    "dense_mlp",
    "router",
    "norms",
    "embedding",
    "lm_head",
    "mtp_projection",
)

Precision = Literal["bf16", "fp8"]
Storage = Literal["quantisable", "bf16", "fp32"]
SplitDim = Literal["none", "rows", "columns"]

_VOCAB_PADDING = 64
_BYTES_BF16 = 2
_BYTES_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor, or `copies` equal ones, of one layer.

    Attributes:
        name: Module name in the checkpoint.
        layer_id: Layer in the checkpoint, `None` for embedding, head and final norm.
        rows: Output size of a projection, or the length of a vector.
        columns: Input size of a projection, 1 for a vector.
        copies: Equal tensors (the experts of a layer).
        storage: "quantisable" follows the checkpoint's precision, others do not.
        split: Dimension that is divided over the GPUs of the group's TP.
    """

    name: str
    group: WeightGroup
    layer_id: int | None
    rows: int
    columns: int = 1
    copies: int = 1
    storage: Storage = "bf16"
    split: SplitDim = "none"

    @property
    def num_parameters(self) -> int:
        """Elements over all copies."""
        return self.rows * self.columns * self.copies


def checkpoint_precision(config: GlmDsaConfig) -> Precision:
    """Storage of the quantisable weights of a checkpoint.

    Raises:
        ValueError: For a quantisation whose bytes this table does not know.
    """
    if config.quant_method is None:
        return "bf16"
    if config.quant_method == "fp8" and config.weight_block_size == (
        FP8_BLOCK,
        FP8_BLOCK,
    ):
        return "fp8"
    raise ValueError(
        f"plan: quantization_config is {config.quant_method!r} with weight_block_size "
        f"{config.weight_block_size}, expected 'fp8' with (128, 128) or no quantization; pass "
        "--weights bf16 or fp8 to plan for one of these instead"
    )


def iter_weights(config: GlmDsaConfig, *, with_mtp: bool = True) -> Iterator[Weight]:
    """All weights of the target model and, with `with_mtp`, of the MTP layer."""
    hidden = config.hidden_size
    yield Weight(
        name="model.embed_tokens",
        group="embedding",
        layer_id=None,
        rows=config.vocab_size,
        columns=hidden,
        split="rows",
    )
    for layer_id in range(config.num_hidden_layers):
        yield from _layer_weights(config, layer_id)
    yield Weight(name="model.norm", group="norms", layer_id=None, rows=hidden)
    yield Weight(
        name="lm_head",
        group="lm_head",
        layer_id=None,
        rows=config.vocab_size,
        columns=hidden,
        split="rows",
    )
    if with_mtp and config.mtp_layer_id is not None:
        layer_id = config.mtp_layer_id
        prefix = f"model.layers.{layer_id}"
        yield from _layer_weights(config, layer_id)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield Weight(name=f"{prefix}.{norm}", group="norms", layer_id=layer_id, rows=hidden)
        yield Weight(
            name=f"{prefix}.eh_proj",
            group="mtp_projection",
            layer_id=layer_id,
            rows=hidden,
            columns=2 * hidden,
        )


def _layer_weights(config: GlmDsaConfig, layer_id: int) -> Iterator[Weight]:
    yield from _attention_weights(config, layer_id)
    if config.has_indexer(layer_id):
        yield from _indexer_weights(config, layer_id)
    if config.is_moe_layer(layer_id):
        yield from _moe_weights(config, layer_id)
    else:
        yield from _mlp_weights(config, layer_id, "dense_mlp", config.intermediate_size, "mlp")


def _attention_weights(config: GlmDsaConfig, layer_id: int) -> Iterator[Weight]:
    prefix = f"model.layers.{layer_id}"
    heads = config.num_attention_heads
    projections: tuple[tuple[str, int, int, SplitDim], ...] = (
        ("q_a_proj", config.q_lora_rank, config.hidden_size, "none"),
        ("kv_a_proj_with_mqa", config.latent_dim, config.hidden_size, "none"),
        ("q_b_proj", heads * config.qk_head_dim, config.q_lora_rank, "rows"),
        (
            "kv_b_proj",
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            config.kv_lora_rank,
            "rows",
        ),
        ("o_proj", config.hidden_size, heads * config.v_head_dim, "columns"),
    )
    for name, rows, columns, split in projections:
        yield Weight(
            name=f"{prefix}.self_attn.{name}",
            group="attention",
            layer_id=layer_id,
            rows=rows,
            columns=columns,
            storage="quantisable",
            split=split,
        )
    norms = (
        ("input_layernorm", config.hidden_size),
        ("post_attention_layernorm", config.hidden_size),
        ("self_attn.q_a_layernorm", config.q_lora_rank),
        ("self_attn.kv_a_layernorm", config.kv_lora_rank),
    )
    for name, size in norms:
        yield Weight(name=f"{prefix}.{name}", group="norms", layer_id=layer_id, rows=size)


def _indexer_weights(config: GlmDsaConfig, layer_id: int) -> Iterator[Weight]:
    prefix = f"model.layers.{layer_id}.self_attn.indexer"
    projections: tuple[tuple[str, int, int, Storage], ...] = (
        ("wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, "quantisable"),
        ("wk", config.index_head_dim, config.hidden_size, "quantisable"),
        ("weights_proj", config.index_n_heads, config.hidden_size, "bf16"),
    )
    for name, rows, columns, storage in projections:
        yield Weight(
            name=f"{prefix}.{name}",
            group="indexer",
            layer_id=layer_id,
            rows=rows,
            columns=columns,
            storage=storage,
        )
    yield Weight(
        name=f"{prefix}.k_norm",
        group="norms",
        layer_id=layer_id,
        rows=config.index_head_dim,
        copies=2,
    )


def _moe_weights(config: GlmDsaConfig, layer_id: int) -> Iterator[Weight]:
    prefix = f"model.layers.{layer_id}.mlp"
    yield Weight(
        name=f"{prefix}.gate",
        group="router",
        layer_id=layer_id,
        rows=config.n_routed_experts,
        columns=config.hidden_size,
    )
    yield Weight(
        name=f"{prefix}.gate.e_score_correction_bias",
        group="router",
        layer_id=layer_id,
        rows=config.n_routed_experts,
        storage="fp32",
    )
    for weight in _mlp_weights(
        config, layer_id, "routed_experts", config.moe_intermediate_size, "mlp.experts"
    ):
        yield replace(weight, copies=config.n_routed_experts)
    if config.n_shared_experts:
        yield from _mlp_weights(
            config,
            layer_id,
            "shared_experts",
            config.moe_intermediate_size * config.n_shared_experts,
            "mlp.shared_experts",
        )


def _mlp_weights(
    config: GlmDsaConfig, layer_id: int, group: WeightGroup, width: int, module: str
) -> Iterator[Weight]:
    shapes: tuple[tuple[str, int, int, SplitDim], ...] = (
        ("gate_proj", width, config.hidden_size, "rows"),
        ("up_proj", width, config.hidden_size, "rows"),
        ("down_proj", config.hidden_size, width, "columns"),
    )
    for name, rows, columns, split in shapes:
        yield Weight(
            name=f"model.layers.{layer_id}.{module}.{name}",
            group=group,
            layer_id=layer_id,
            rows=rows,
            columns=columns,
            storage="quantisable",
            split=split,
        )


def parameters_by_group(config: GlmDsaConfig, *, with_mtp: bool = True) -> dict[WeightGroup, int]:
    """Number of parameters of each group, zero groups included."""
    totals: dict[WeightGroup, int] = dict.fromkeys(WEIGHT_GROUPS, 0)
    for weight in iter_weights(config, with_mtp=with_mtp):
        totals[weight.group] += weight.num_parameters
    return totals


def active_parameters(config: GlmDsaConfig, *, with_embedding: bool = True) -> int:
    """Parameters that one token uses: all of the target but the experts it does not choose."""
    totals = parameters_by_group(config, with_mtp=False)
    chosen = totals["routed_experts"] * config.num_experts_per_tok // config.n_routed_experts
    active = sum(totals.values()) - totals["routed_experts"] + chosen
    return active if with_embedding else active - totals["embedding"]


def weight_bytes(weight: Weight, precision: Precision) -> int:
    """Bytes of a weight: FP8 is one byte an element and one FP32 scale a 128 x 128 block."""
    if weight.storage == "fp32":
        return weight.num_parameters * _BYTES_FP32
    if weight.storage == "bf16" or precision == "bf16":
        return weight.num_parameters * _BYTES_BF16
    blocks = math.ceil(weight.rows / FP8_BLOCK) * math.ceil(weight.columns / FP8_BLOCK)
    return weight.num_parameters + weight.copies * blocks * _BYTES_FP32


def effective_storage(weight: Weight, config: GlmDsaConfig) -> Weight:
    """The weight with BF16 storage if the checkpoint excludes its module from quantisation."""
    if weight.storage != "quantisable":
        return weight
    names = (weight.name, weight.name.replace(".mlp.experts.", ".mlp.experts.0."))
    kept = any(
        _names_module(entry, name) for entry in config.modules_not_quantized for name in names
    )
    return replace(weight, storage="bf16") if kept else weight


def loaded_weight(weight: Weight, config: GlmDsaConfig) -> Weight:
    """The weight with the storage it has on a GPU.

    SGLang 0.5.23 fuses `wk` with the BF16 `weights_proj` and dequantises it for that, and keeps
    the index-key norm in FP32.
    """
    if weight.name.endswith(".indexer.wk"):
        return replace(weight, storage="bf16")
    if weight.name.endswith(".indexer.k_norm"):
        return replace(weight, storage="fp32")
    return effective_storage(weight, config)


def _names_module(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return f".{entry}." in f".{name}."


def checkpoint_bytes(config: GlmDsaConfig, precision: Precision, *, with_mtp: bool = True) -> int:
    """Bytes of all tensors of a checkpoint, file headers not counted."""
    return sum(
        weight_bytes(effective_storage(weight, config), precision)
        for weight in iter_weights(config, with_mtp=with_mtp)
    )


def shard(weight: Weight, layout: ParallelLayout) -> Weight:
    """The part of a weight that one GPU holds."""
    if weight.group == "routed_experts":
        copies = weight.copies // layout.ep_size
        return replace(_split(weight, layout.moe_tp_size), copies=copies)
    if weight.group in ("embedding", "lm_head"):
        parts = layout.attn_tp_size if weight.group == "embedding" else layout.lm_head_tp_size
        return _split(replace(weight, rows=_padded_vocabulary(weight.rows, parts)), parts)
    parts_of_group = {
        "attention": layout.attn_tp_size,
        "dense_mlp": layout.dense_mlp_tp_size,
        "shared_experts": layout.shared_experts_tp_size,
    }
    return _split(weight, parts_of_group.get(weight.group, 1))


def check_fp8_blocks(config: GlmDsaConfig, layout: ParallelLayout) -> None:
    """Refuse a layout that cuts an FP8 weight inside a 128 x 128 block, as SGLang does.

    Args:
        config: The model.
        layout: A layout that `ParallelLayout.check` accepts.

    Raises:
        ValueError: Naming the first weight that is cut.
    """
    for weight in iter_weights(config):
        whole = loaded_weight(weight, config)
        if whole.storage != "quantisable":
            continue
        local = shard(whole, layout)
        for dim, size, part in (
            ("rows", whole.rows, local.rows),
            ("columns", whole.columns, local.columns),
        ):
            if part != size and part % FP8_BLOCK:
                raise ValueError(
                    f"plan: {weight.name} has {part} of {size} {dim} on a GPU, expected a multiple "
                    f"of the FP8 block of {FP8_BLOCK}; use a smaller TP (larger ep_size for "
                    "experts, larger attn_dp_size for attention)"
                )


def _padded_vocabulary(rows: int, parts: int) -> int:
    """SGLang pads to 64 rows, or to 64 on each GPU where that does not divide."""
    padded = math.ceil(rows / _VOCAB_PADDING) * _VOCAB_PADDING
    unit = _VOCAB_PADDING if padded % parts == 0 else _VOCAB_PADDING * parts
    return math.ceil(rows / unit) * unit


def _split(weight: Weight, parts: int) -> Weight:
    if weight.split == "rows":
        return replace(weight, rows=weight.rows // parts)
    if weight.split == "columns":
        return replace(weight, columns=weight.columns // parts)
    return weight


def weight_bytes_per_gpu(
    config: GlmDsaConfig,
    layout: ParallelLayout,
    precision: Precision,
    *,
    with_mtp: bool = True,
) -> dict[WeightGroup, int]:
    """Bytes of each group on one GPU as loaded, `absorbed_bytes_per_gpu` not included."""
    totals: dict[WeightGroup, int] = dict.fromkeys(WEIGHT_GROUPS, 0)
    for weight in iter_weights(config, with_mtp=with_mtp):
        local = shard(loaded_weight(weight, config), layout)
        totals[weight.group] += weight_bytes(local, precision)
    return totals


def absorbed_bytes_per_gpu(
    config: GlmDsaConfig, layout: ParallelLayout, *, with_mtp: bool = True
) -> int:
    """BF16 copies of `kv_b_proj` that the absorbed attention multiplies with.

    SGLang's loader (`post_load_weights`) dequantises `kv_b_proj` into W_UK and W_UV and keeps the
    original for prefill, so both occupy memory.
    """
    num_layers = config.num_hidden_layers
    if with_mtp:
        num_layers += config.num_nextn_predict_layers
    return num_layers * absorbed_parameters_per_gpu(config, layout) * _BYTES_BF16


def absorbed_parameters_per_gpu(config: GlmDsaConfig, layout: ParallelLayout) -> int:
    """Elements of W_UK and W_UV of one layer on one GPU."""
    heads = config.num_attention_heads // layout.attn_tp_size
    return heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
