"""Bytes read and FLOPs done by one GPU, per decode step and per prefill chunk.

A step is a list of terms; each is a kind of work with its HBM traffic and its matrix arithmetic.
Activations, norms and the new cache rows are left out: a decode step moves megabytes of them
against gigabytes of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from sglang_glm.planning import kv_cache
from sglang_glm.planning.weights import (
    absorbed_parameters_per_gpu,
    iter_weights,
    loaded_weight,
    shard,
    weight_bytes,
)

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.experts import Routing
    from sglang_glm.planning.kv_cache import KvDtype
    from sglang_glm.planning.layout import ParallelLayout
    from sglang_glm.planning.weights import Precision, WeightGroup

TermName = Literal[
    "attention projections",
    "indexer projections",
    "index scoring",
    "top-k selection",
    "sparse attention",
    "routed experts",
    "shared experts",
    "dense MLP",
    "router",
    "MTP projection",
    "LM head",
]
MathKind = Literal["bf16", "fp8", "none"]

_LOGIT_BYTES = 4
_BYTES_BF16 = 2

_TERM_OF_GROUP: dict[WeightGroup, TermName] = {
    "attention": "attention projections",
    "indexer": "indexer projections",
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "dense_mlp": "dense MLP",
    "router": "router",
    "mtp_projection": "MTP projection",
    "lm_head": "LM head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One kind of work of a step on one GPU.

    Attributes:
        hbm_bytes: Bytes read from (and, for scores, written to) memory.
        flops: Multiplications and additions on the matrix units, two per multiply-add.
        math: Which rate of the matrix units applies.
        launches: Kernels of this kind, for terms whose kernels have a known fixed time.
    """

    name: TermName
    hbm_bytes: float
    flops: float
    math: MathKind
    launches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """What stays the same over the steps of one plan."""

    config: GlmDsaConfig
    layout: ParallelLayout
    precision: Precision
    kv_dtype: KvDtype
    routing: Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoad:
    """What one forward pass of a stack of layers processes.

    Attributes:
        rows_per_gpu: Tokens that this GPU's attention group processes.
        rows_total: Tokens of the whole replica, which meet in the experts.
        logit_rows_per_gpu: Rows of this GPU's attention group that reach the LM head.
        logit_rows_total: Rows of the replica that reach the LM head.
        scored_keys: Sum over the group's rows of the keys each may score.
        read_index_keys: Index keys read from memory: `scored_keys` when every row reads its
            own, the sum of request lengths when the rows of a request share one read.
        selected_rows: Sum over the group's rows of the latent rows each attends to.
    """

    rows_per_gpu: float
    rows_total: float
    logit_rows_per_gpu: float
    logit_rows_total: float
    scored_keys: float
    read_index_keys: float
    selected_rows: float


def decode_load(
    setup: ModelSetup,
    *,
    context_tokens: int,
    concurrency: int,
    rows_per_request: int = 1,
    rows_share_index_keys: bool = False,
) -> RowLoad:
    """Load of a decode step (one row a request) or a verify step (`rows_per_request` rows).

    Args:
        setup: Model and layout.
        context_tokens: Length of every request, the new tokens included.
        concurrency: Requests of the whole replica.
        rows_per_request: 1, or the draft tokens of an MTP round.
        rows_share_index_keys: Whether the scoring kernel reads a request's keys once for all its
            rows. SGLang 0.5.23 flattens the rows on Hopper and reads them once per row.
    """
    requests = concurrency / setup.layout.attn_dp_size
    rows = requests * rows_per_request
    reads = requests if rows_share_index_keys else rows
    return RowLoad(
        rows_per_gpu=rows,
        rows_total=concurrency * rows_per_request,
        logit_rows_per_gpu=rows,
        logit_rows_total=concurrency * rows_per_request,
        scored_keys=rows * context_tokens,
        read_index_keys=reads * context_tokens,
        selected_rows=rows * min(setup.config.index_topk, context_tokens),
    )


def prefill_load(setup: ModelSetup, *, prefix_tokens: int, chunk_tokens: int) -> RowLoad:
    """Load of one prefill chunk on every attention group at once.

    Args:
        setup: Model and layout.
        prefix_tokens: Tokens of the request that are cached already.
        chunk_tokens: New tokens, on each attention group. Row i of them scores
            `prefix_tokens + i + 1` keys and attends to at most `index_topk` of these.
    """
    config = setup.config
    first, last = prefix_tokens + 1, prefix_tokens + chunk_tokens
    scored = (first + last) * chunk_tokens / 2
    short_rows = max(0, min(last, config.index_topk) - prefix_tokens)
    selected = (2 * first + short_rows - 1) * short_rows / 2
    selected += (chunk_tokens - short_rows) * config.index_topk
    return RowLoad(
        rows_per_gpu=chunk_tokens,
        rows_total=chunk_tokens * setup.layout.attn_dp_size,
        logit_rows_per_gpu=1,
        logit_rows_total=setup.layout.attn_dp_size,
        scored_keys=scored,
        # A tile of query rows shares each key it reads, so the chunk reads the keys about once.
        read_index_keys=last,
        selected_rows=selected,
    )


def target_terms(setup: ModelSetup, load: RowLoad) -> list[Term]:
    """Terms of one forward pass of the target: all decoder layers and the LM head."""
    config = setup.config
    weight_terms = _weight_terms(setup, load, mtp=False)
    return weight_terms + _attention_terms(
        setup,
        load,
        num_layers=config.num_hidden_layers,
        num_scoring_layers=len(config.full_index_layer_ids),
        latent_shards=setup.layout.dcp_size,
    )


def mtp_terms(setup: ModelSetup, load: RowLoad, *, scores_index: bool) -> list[Term]:
    """Terms of one forward pass of the MTP layer, whose LM head is the target's.

    Args:
        setup: Model and layout; the model must have an MTP layer.
        load: Rows of the pass.
        scores_index: False for draft steps that reuse the round's selection
            (`index_share_for_mtp_iteration`); they still compute and write their index key.
    """
    if setup.config.mtp_layer_id is None:
        raise ValueError("plan: the model has no MTP layer (num_nextn_predict_layers is 0)")
    return _weight_terms(setup, load, mtp=True) + _attention_terms(
        setup, load, num_layers=1, num_scoring_layers=int(scores_index), latent_shards=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalWeights:
    """Weights of one group on one GPU; routed experts are kept apart by layer."""

    group: WeightGroup
    layer_id: int | None
    read_bytes: float
    parameters: float
    copies: int


@lru_cache(maxsize=64)
def _local_weights(
    config: GlmDsaConfig, layout: ParallelLayout, precision: Precision, mtp: bool
) -> tuple[_LocalWeights, ...]:
    # A plan sums the same table for every chunk of a long prompt, hence the cache.
    sums: dict[tuple[WeightGroup, int | None], _LocalWeights] = {}
    absorbed = absorbed_parameters_per_gpu(config, layout)
    for weight in iter_weights(config, with_mtp=mtp):
        in_pass = (weight.layer_id == config.mtp_layer_id) == mtp
        if weight.group not in _TERM_OF_GROUP or not (in_pass or weight.group == "lm_head"):
            continue
        local = shard(loaded_weight(weight, config), layout)
        read_bytes, parameters = weight_bytes(local, precision), local.num_parameters
        if weight.name.endswith(".kv_b_proj"):
            # The absorbed form multiplies with the BF16 copies instead.
            read_bytes, parameters = absorbed * _BYTES_BF16, absorbed
        layer_id = weight.layer_id if weight.group == "routed_experts" else None
        before = sums.get((weight.group, layer_id))
        sums[weight.group, layer_id] = _LocalWeights(
            group=weight.group,
            layer_id=layer_id,
            read_bytes=read_bytes + (before.read_bytes if before else 0.0),
            parameters=parameters + (before.parameters if before else 0.0),
            copies=local.copies,
        )
    return tuple(sums.values())


def _weight_terms(setup: ModelSetup, load: RowLoad, *, mtp: bool) -> list[Term]:
    totals: dict[TermName, list[float]] = {}
    for weights in _local_weights(setup.config, setup.layout, setup.precision, mtp):
        hbm_bytes, flops = _weight_work(setup, load, weights)
        sums = totals.setdefault(_TERM_OF_GROUP[weights.group], [0.0, 0.0])
        sums[0] += hbm_bytes
        sums[1] += flops
    return [
        Term(name=name, hbm_bytes=sums[0], flops=sums[1], math=_math_of(name, setup.precision))
        for name, sums in totals.items()
    ]


def _weight_work(setup: ModelSetup, load: RowLoad, weights: _LocalWeights) -> tuple[float, float]:
    """Bytes read and FLOPs of some weights on one GPU."""
    if weights.layer_id is None:
        rows = _rows_through(setup, load, weights.group)
        return weights.read_bytes, 2 * weights.parameters * rows
    config, layout, layer_id = setup.config, setup.layout, weights.layer_id
    hit = setup.routing.experts_hit_per_gpu(config, layout, layer_id, load.rows_total)
    share = setup.routing.token_share_per_gpu(config, layout, layer_id)
    pairs = load.rows_total * config.num_experts_per_tok * share
    per_expert = weights.parameters / weights.copies
    return weights.read_bytes * hit / weights.copies, 2 * per_expert * pairs


def _rows_through(setup: ModelSetup, load: RowLoad, group: WeightGroup) -> float:
    """Rows that one GPU multiplies with a weight of a group."""
    layout = setup.layout
    if group == "lm_head":
        whole_replica = not layout.lm_head_per_attn_group
        return load.logit_rows_total if whole_replica else load.logit_rows_per_gpu
    if group == "dense_mlp":
        return load.rows_per_gpu if layout.dense_mlp_replicated else load.rows_total
    if group in ("shared_experts", "router"):
        # Under an all-to-all every GPU keeps its own share of the tokens around the MoE.
        whole_replica = layout.moe_dispatch == "none"
        return load.rows_total if whole_replica else load.rows_total / layout.tp_size
    return load.rows_per_gpu


def _math_of(name: TermName, precision: Precision) -> MathKind:
    bf16_in_any_checkpoint = ("router", "MTP projection", "LM head")
    return "bf16" if precision == "bf16" or name in bf16_in_any_checkpoint else "fp8"


def _attention_terms(
    setup: ModelSetup,
    load: RowLoad,
    *,
    num_layers: int,
    num_scoring_layers: int,
    latent_shards: int,
) -> list[Term]:
    config, layout = setup.config, setup.layout
    # With the rows split over DCP ranks each rank runs all heads of the group over its share, so
    # the arithmetic stays the same and the traffic divides.
    local_rows = load.selected_rows / latent_shards
    heads = config.num_attention_heads // layout.attn_tp_size
    row_bytes = kv_cache.latent_row_bytes(config, setup.kv_dtype)
    terms = [
        Term(
            name="sparse attention",
            hbm_bytes=latent_read_bytes(local_rows, row_bytes) * num_layers,
            flops=sparse_attention_flops(config, load.selected_rows, heads) * num_layers,
            math="bf16",
            launches=num_layers,
        )
    ]
    if num_scoring_layers:
        score_bytes = load.scored_keys * _LOGIT_BYTES
        keys = load.read_index_keys * kv_cache.index_key_bytes(config)
        terms += [
            Term(
                name="index scoring",
                hbm_bytes=(keys + score_bytes) * num_scoring_layers,
                flops=index_scoring_flops(config, load.scored_keys) * num_scoring_layers,
                math="fp8",
                launches=num_scoring_layers,
            ),
            Term(
                name="top-k selection",
                hbm_bytes=score_bytes * num_scoring_layers,
                flops=0.0,
                math="none",
                launches=num_scoring_layers,
            ),
        ]
    return terms


def latent_read_bytes(selected_rows: float, row_bytes: int) -> float:
    """Latent bytes that one layer's sparse attention gathers, repeats across rows included."""
    return selected_rows * row_bytes


def sparse_attention_flops(config: GlmDsaConfig, selected_rows: float, num_heads: float) -> float:
    """FLOPs of one layer's absorbed attention: q·k over 576 and p·v over 512 elements a head."""
    return 2 * selected_rows * num_heads * (config.latent_dim + config.kv_lora_rank)


def index_scoring_flops(config: GlmDsaConfig, scored_keys: float) -> float:
    """FLOPs of one layer's index scores: every index head against every key."""
    return 2 * config.index_n_heads * config.index_head_dim * scored_keys
