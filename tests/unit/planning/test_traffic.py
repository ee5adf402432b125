"""Bytes and FLOPs of a step against sums written out by hand.

- prefill sums equal a loop over the rows
- decode terms equal products of published sizes
- a draft step that shares its selection scores nothing
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_glm.planning.experts import RecordedHits, UniformRouting
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config
from sglang_glm.planning.traffic import (
    ModelSetup,
    decode_load,
    mtp_terms,
    prefill_load,
    target_terms,
)

GLM = load_config("zai-org/GLM-5.3")
DP8 = ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all")


def make_setup(layout=DP8, **changes):
    setup = ModelSetup(
        config=GLM,
        layout=layout,
        precision="fp8",
        kv_dtype="fp8_packed",
        routing=UniformRouting(),
    )
    return dataclasses.replace(setup, **changes)


def terms_of(terms):
    return {term.name: term for term in terms}


@given(
    prefix=st.integers(0, 6000),
    chunk=st.integers(1, 3000),
    index_topk=st.integers(1, 5000),
)
def test_prefill_sums_equal_a_loop(prefix, chunk, index_topk):
    setup = make_setup(config=dataclasses.replace(GLM, index_topk=index_topk))
    load = prefill_load(setup, prefix_tokens=prefix, chunk_tokens=chunk)
    lengths = range(prefix + 1, prefix + chunk + 1)
    assert load.scored_keys == sum(lengths)
    assert load.selected_rows == sum(min(index_topk, length) for length in lengths)
    assert load.read_index_keys == prefix + chunk


def test_decode_terms():
    load = decode_load(make_setup(), context_tokens=131_072, concurrency=64)
    terms = terms_of(target_terms(make_setup(), load))
    assert load.rows_per_gpu == 8
    assert terms["sparse attention"].hbm_bytes == 8 * 2048 * 656 * 78
    assert terms["sparse attention"].flops == 8 * 2048 * 64 * 2 * (576 + 512) * 78
    assert terms["index scoring"].hbm_bytes == 8 * 131_072 * (132 + 4) * 21
    assert terms["index scoring"].flops == 8 * 131_072 * 2 * 32 * 128 * 21
    assert terms["top-k selection"].hbm_bytes == 8 * 131_072 * 4 * 21
    assert terms["LM head"].hbm_bytes == 2 * 154_880 * 6144 / 8
    assert terms["LM head"].flops == 2 * 154_880 * 6144 / 8 * 64


def test_short_context_reads_only_what_exists():
    load = decode_load(make_setup(), context_tokens=1000, concurrency=8)
    assert load.selected_rows == 1000


def test_absorbed_attention_reads_bf16_copies():
    load = decode_load(make_setup(), context_tokens=1, concurrency=8)
    quantised = 16_121_856 + 33_554_432 + 100_663_296
    # FP8 scales: one FP32 a block of 128 x 128, the 576 rows of kv_a take 5 blocks.
    scales = 4 * (16 * 48 + 5 * 48 + 128 * 16 + 48 * 128)
    expected = 78 * (quantised + scales + 2 * 14_680_064)
    assert terms_of(target_terms(make_setup(), load))["attention projections"].hbm_bytes == expected


def test_attention_tp_splits_heads_but_not_the_cache():
    layout = ParallelLayout(tp_size=8)
    setup = make_setup(layout)
    load = decode_load(setup, context_tokens=4096, concurrency=8)
    terms = terms_of(target_terms(setup, load))
    assert terms["sparse attention"].hbm_bytes == 8 * 2048 * 656 * 78
    assert terms["sparse attention"].flops == 8 * 2048 * 8 * 2 * (576 + 512) * 78
    sharded = make_setup(dataclasses.replace(layout, dcp_size=8))
    with_dcp = terms_of(target_terms(sharded, load))
    assert with_dcp["sparse attention"].hbm_bytes * 8 == terms["sparse attention"].hbm_bytes
    assert with_dcp["index scoring"] == terms["index scoring"]


def test_experts_read_what_is_hit_and_compute_what_is_routed():
    setup = make_setup(routing=RecordedHits(64))
    load = decode_load(setup, context_tokens=1, concurrency=64)
    experts = terms_of(target_terms(setup, load))["routed experts"]
    one_expert = 3 * (2048 * 6144 + 4 * 16 * 48)
    assert experts.hbm_bytes == pytest.approx(75 * 8 * one_expert)
    assert experts.flops == pytest.approx(75 * 64 * 8 / 8 * 2 * 3 * 2048 * 6144)


@pytest.mark.parametrize("layout", [DP8, ParallelLayout(tp_size=8), ParallelLayout()])
def test_arithmetic_adds_up_to_two_flops_a_parameter_and_row(layout):
    setup = make_setup(layout)
    load = decode_load(setup, context_tokens=1, concurrency=64)
    terms = terms_of(target_terms(setup, load))
    attended = ("sparse attention", "index scoring", "top-k selection")
    over_replica = {
        "shared experts": 2.831155e9,
        "dense MLP": 0.679477e9,
        "LM head": 0.951583e9,
        "routed experts": 724.775731e9 / 256 * 8,
    }
    for name, parameters in over_replica.items():
        assert terms[name].flops * layout.tp_size == pytest.approx(2 * 64 * parameters, rel=1e-5)
    assert all(term.flops > 0 for name, term in terms.items() if name not in attended)


def test_verify_rows_share_index_keys_if_the_kernel_can():
    setup = make_setup()
    kwargs = {"context_tokens": 131_072, "concurrency": 64, "rows_per_request": 6}
    flat = decode_load(setup, **kwargs)
    shared = decode_load(setup, **kwargs, rows_share_index_keys=True)
    assert flat.read_index_keys == 6 * shared.read_index_keys
    assert flat.scored_keys == shared.scored_keys


def test_mtp_pass_has_one_layer_and_the_head():
    setup = make_setup()
    load = decode_load(setup, context_tokens=4096, concurrency=8)
    scoring = terms_of(mtp_terms(setup, load, scores_index=True))
    sharing = terms_of(mtp_terms(setup, load, scores_index=False))
    assert set(scoring) - set(sharing) == {"index scoring", "top-k selection"}
    assert "indexer projections" in sharing, "the index key is still written"
    assert scoring["index scoring"].launches == 1
    assert scoring["MTP projection"].hbm_bytes == 2 * 6144 * 2 * 6144
    assert "dense MLP" not in scoring
    assert scoring["LM head"] == terms_of(target_terms(setup, load))["LM head"]


def test_mtp_needs_an_mtp_layer():
    setup = make_setup(config=dataclasses.replace(GLM, num_nextn_predict_layers=0))
    load = decode_load(setup, context_tokens=1, concurrency=8)
    with pytest.raises(ValueError, match="no MTP layer"):
        mtp_terms(setup, load, scores_index=True)


def test_bf16_weights_use_the_bf16_rate():
    setup = make_setup(precision="bf16")
    load = decode_load(setup, context_tokens=1, concurrency=8)
    assert all(
        term.math in ("bf16", "none") or term.name == "index scoring"
        for term in target_terms(setup, load)
    )
