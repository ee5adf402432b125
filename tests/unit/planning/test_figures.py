"""The published bill of GLM-5.3, figure by figure, within 0.5% (or the rounding it is given in).

Every expected value is written here and nowhere in the package.
"""

import pytest

from sglang_glm.planning import collectives, kv_cache, memory, traffic, weights
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config

GLM = load_config("zai-org/GLM-5.3")
TOKENS_1M = 1_048_576
EP8 = ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all")


def parameters(group: weights.WeightGroup, *, with_mtp: bool = False) -> int:
    return weights.parameters_by_group(GLM, with_mtp=with_mtp)[group]


def layer_parameters(module: str, layer_id: int = 6) -> int:
    prefix = f"model.layers.{layer_id}.{module}"
    found = [w for w in weights.iter_weights(GLM) if w.name.startswith(prefix)]
    assert found, module
    return sum(w.num_parameters for w in found if w.group != "norms")


def total_parameters(*, with_mtp: bool) -> int:
    return sum(weights.parameters_by_group(GLM, with_mtp=with_mtp).values())


def whole_model_forward(num_tokens: float, layout: ParallelLayout) -> dict[str, float]:
    calls = collectives.forward_collectives(
        GLM, layout, num_tokens=num_tokens, num_logit_rows=num_tokens
    )
    return {call.name: call.total_message_bytes for call in calls}


def all_reduce_of_tp8(field: str) -> float:
    calls = collectives.forward_collectives(
        GLM, ParallelLayout(tp_size=8), num_tokens=8192, num_logit_rows=1
    )
    reduces = [call for call in calls if call.name == "all-reduce"]
    if field == "count":
        return sum(call.count for call in reduces)
    if field == "message":
        return reduces[0].message_bytes
    return sum(call.total_message_bytes for call in reduces)


EXACT = [
    ("latent elements a token", lambda: kv_cache.latent_elements_per_token(GLM), 44_928),
    ("FP8 row", lambda: kv_cache.latent_row_bytes(GLM, "fp8_packed"), 656),
    ("BF16 row", lambda: kv_cache.latent_row_bytes(GLM, "bf16"), 1152),
    ("plain FP8 row", lambda: kv_cache.latent_row_bytes(GLM, "fp8_plain"), 576),
    ("index key", lambda: kv_cache.index_key_bytes(GLM), 132),
    ("index bytes a token", lambda: kv_cache.index_bytes_per_token(GLM), 2_772),
    ("index page", lambda: kv_cache.index_page_bytes(GLM), 8_448),
    ("MTP layer a token", lambda: kv_cache.mtp_bytes_per_token(GLM, "fp8_packed"), 788),
    ("full index layers", lambda: len(GLM.full_index_layer_ids), 21),
    ("all-reduces of a TP8 pass", lambda: all_reduce_of_tp8("count"), 156),
    # The tensors of the released FP8 checkpoint, to the byte.
    ("released FP8 tensors", lambda: weights.checkpoint_bytes(GLM, "fp8"), 755_617_140_416),
]

WITHIN_HALF_PERCENT = [
    ("A projections", lambda: layer_parameters("self_attn.q_a_proj")
     + layer_parameters("self_attn.kv_a_proj"), 16.12e6),
    ("q_b", lambda: layer_parameters("self_attn.q_b_proj"), 33.55e6),
    ("kv_b", lambda: layer_parameters("self_attn.kv_b_proj"), 14.68e6),
    ("o", lambda: layer_parameters("self_attn.o_proj"), 100.66e6),
    ("attention of a layer", lambda: parameters("attention") / 78, 165.02e6),
    ("attention", lambda: parameters("attention"), 12.87e9),
    ("one indexer", lambda: parameters("indexer") / 21, 9.37e6),
    ("indexers", lambda: parameters("indexer"), 0.197e9),
    ("one expert", lambda: parameters("routed_experts") / 75 / 256, 37.75e6),
    ("routed experts of a layer", lambda: parameters("routed_experts") / 75, 9.664e9),
    ("routed experts", lambda: parameters("routed_experts"), 724.8e9),
    ("shared experts", lambda: parameters("shared_experts"), 2.83e9),
    ("dense layers", lambda: parameters("dense_mlp"), 0.68e9),
    ("embedding and head", lambda: parameters("embedding") + parameters("lm_head"), 1.90e9),
    ("parameters", lambda: total_parameters(with_mtp=False), 743.4e9),
    ("parameters with MTP", lambda: total_parameters(with_mtp=True), 753.3e9),
    ("KV of a token, one byte an element", lambda: kv_cache.latent_bytes_per_token(
        GLM, "fp8_plain"), 44.9e3),
    ("KV of a token, FP8 rows", lambda: kv_cache.latent_bytes_per_token(
        GLM, "fp8_packed"), 51.2e3),
    ("KV of a token, BF16", lambda: kv_cache.latent_bytes_per_token(GLM, "bf16"), 89.9e3),
    ("KV of 1M tokens, one byte an element", lambda: TOKENS_1M
     * kv_cache.latent_bytes_per_token(GLM, "fp8_plain"), 47.1e9),
    ("KV of 1M tokens, FP8 rows", lambda: TOKENS_1M
     * kv_cache.latent_bytes_per_token(GLM, "fp8_packed"), 53.7e9),
    ("KV of 1M tokens, BF16", lambda: TOKENS_1M
     * kv_cache.latent_bytes_per_token(GLM, "bf16"), 94.2e9),
    ("index of 1M tokens", lambda: TOKENS_1M * kv_cache.index_bytes_per_token(GLM), 2.907e9),
    ("latent reads of a decode token", lambda: 78
     * traffic.latent_read_bytes(2048, kv_cache.latent_row_bytes(GLM, "fp8_packed")), 104.8e6),
    ("latent reads at one byte an element", lambda: 78
     * traffic.latent_read_bytes(2048, kv_cache.latent_row_bytes(GLM, "fp8_plain")), 92.0e6),
    ("index reads at 131,072", lambda: 131_072
     * kv_cache.index_bytes_per_token(GLM), 363e6),
    ("all-reduce of 8,192 tokens", lambda: all_reduce_of_tp8("message"), 100.7e6),
    ("all-reduces of a TP8 prefill", lambda: all_reduce_of_tp8("total"), 15.7e9),
    ("dispatch of 8,192 tokens", lambda: collectives.dispatch_message_bytes(GLM, 8192), 0.403e9),
    ("combine of 8,192 tokens", lambda: collectives.combine_message_bytes(GLM, 8192), 0.805e9),
    ("dispatch and combine of a prefill", lambda: whole_model_forward(8192, EP8)["dispatch"]
     + whole_model_forward(8192, EP8)["combine"], 90.6e9),
    ("gather of 32 tokens", lambda: collectives.hidden_message_bytes(GLM, 32), 393e3),
    ("gathers and scatters of a decode step", lambda: sum(
        whole_model_forward(32, ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8))[name]
        for name in ("all-gather", "reduce-scatter")), 61.3e6),
    ("dispatch of 32 tokens", lambda: collectives.dispatch_message_bytes(GLM, 32), 1.573e6),
    ("dispatches of a decode step", lambda: whole_model_forward(32, EP8)["dispatch"], 118.0e6),
    ("combines of a decode step", lambda: whole_model_forward(32, EP8)["combine"], 235.9e6),
    ("LM-head gather of 32 x 6 rows", lambda: collectives.lm_head_gather_bytes(
        GLM, 32 * 6), 59.5e6),
    ("index scores of 192 rows at 1M", lambda: memory.index_score_bytes(
        192, TOKENS_1M), 805e6),
    ("logits of 192 rows", lambda: memory.logits_bytes(GLM, 192), 59.47e6 + 118.95e6),
]  # fmt: skip

ROUNDED_TO_TWO_DIGITS = [
    ("active parameters", lambda: weights.active_parameters(GLM), 41e9),
    ("active without embedding", lambda: weights.active_parameters(
        GLM, with_embedding=False), 40e9),
    ("experts of an EP8 GPU", lambda: parameters("routed_experts") / 8, 91e9),
    ("replicated weights of an EP8 GPU", lambda: total_parameters(with_mtp=False)
     - parameters("routed_experts"), 18e9),
    ("ms to read an EP8 GPU's experts at 4.8 TB/s", lambda: 1e3
     * parameters("routed_experts") / 8 / 4.8e12, 19),
    ("ms to read the replicated weights", lambda: 1e3 * (total_parameters(with_mtp=False)
     - parameters("routed_experts")) / 4.8e12, 4),
]  # fmt: skip


def by_name(cases):
    return pytest.mark.parametrize(
        ("compute", "expected"), [pytest.param(fn, value, id=name) for name, fn, value in cases]
    )


@by_name(EXACT)
def test_exact_figures(compute, expected):
    assert compute() == expected


@by_name(WITHIN_HALF_PERCENT)
def test_figures_within_half_a_percent(compute, expected):
    assert compute() == pytest.approx(expected, rel=0.005)


@by_name(ROUNDED_TO_TWO_DIGITS)
def test_rounded_figures(compute, expected):
    assert compute() == pytest.approx(expected, rel=0.035)


def test_older_members_index_every_layer():
    older = load_config("zai-org/GLM-5.1")
    assert kv_cache.index_bytes_per_token(older) == 132 * 78
    indexers = weights.parameters_by_group(older, with_mtp=False)["indexer"]
    assert indexers == pytest.approx(9.37e6 * 78, rel=0.005)
