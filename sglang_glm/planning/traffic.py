"""Bytes read and FLOPs done by one GPU, per decode step and per prefill chunk.

A step is a list of terms; each is a kind of work with its HBM traffic and its matrix arithmetic.
Activations, norms and the new cache rows are left out: a decode step moves megabytes of them
against gigabytes of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sglang_glm.planning import kv_cache
from sglang_glm.planning.weights import (
    WeightGroup,
    absorbed_parameters_per_gpu,
    effective_storage,
    iter_weights,
    shard,
    weight_bytes,
)

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.experts import Routing
    from sglang_glm.planning.kv_cache import KvDtype
    from sglang_glm.planning.layout import ParallelLayout
    from sglang_glm.planning.weights import Precision

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
        setup, load, num_layers=1, num_scoring_layers=int(scores_index)
    )


def _weight_terms(setup: ModelSetup, load: RowLoad, *, mtp: bool) -> list[Term]:
    config, layout = setup.config, setup.layout
    totals: dict[TermName, list[float]] = {}
    absorbed = absorbed_parameters_per_gpu(config, layout)
    for full_weight in iter_weights(config, with_mtp=mtp):
        term_name = _TERM_OF_GROUP.get(full_weight.group)
        in_mtp = full_weight.layer_id == config.mtp_layer_id
        is_head = full_weight.group == "lm_head"
        if term_name is None or (full_weight.layer_id is not None and in_mtp != mtp):
            continue
        weight = shard(effective_storage(full_weight, config), layout)
        stored_bytes = float(weight_bytes(weight, setup.precision))
        parameters = float(weight.num_parameters)
        rows = load.rows_per_gpu
        if weight.name.endswith(".kv_b_proj"):
            # The absorbed form multiplies with the BF16 copies instead.
            parameters, stored_bytes = float(absorbed), float(absorbed * _BYTES_BF16)
        elif weight.group == "routed_experts" and weight.layer_id is not None:
            hit = setup.routing.experts_hit_per_gpu(
                config, layout, weight.layer_id, load.rows_total
            )
            share = setup.routing.token_share_per_gpu(config, layout, weight.layer_id)
            stored_bytes *= hit / weight.copies
            parameters /= weight.copies
            rows = load.rows_total * config.num_experts_per_tok * share
        elif is_head:
            rows = (
                load.logit_rows_per_gpu if layout.lm_head_per_attn_group else load.logit_rows_total
            )
        elif weight.group == "dense_mlp" and not layout.dense_mlp_replicated:
            rows = load.rows_total
        elif weight.group == "shared_experts" and layout.moe_dispatch == "none":
            rows = load.rows_total
        sums = totals.setdefault(term_name, [0.0, 0.0])
        sums[0] += stored_bytes
        sums[1] += 2 * parameters * rows
    return [
        Term(name=name, hbm_bytes=sums[0], flops=sums[1], math=_math_of(name, setup.precision))
        for name, sums in totals.items()
    ]


def _math_of(name: TermName, precision: Precision) -> MathKind:
    bf16_in_any_checkpoint = ("router", "MTP projection", "LM head")
    return "bf16" if precision == "bf16" or name in bf16_in_any_checkpoint else "fp8"


def _attention_terms(
    setup: ModelSetup, load: RowLoad, *, num_layers: int, num_scoring_layers: int
) -> list[Term]:
    config, layout = setup.config, setup.layout
    heads = config.num_attention_heads // layout.attn_tp_size
    row_bytes = kv_cache.latent_row_bytes(config, setup.kv_dtype)
    terms = [
        Term(
            name="sparse attention",
            hbm_bytes=latent_read_bytes(load.selected_rows, row_bytes) * num_layers,
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
