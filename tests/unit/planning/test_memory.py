"""What fits: parts add up to the GPU, pages round up, and refusals say what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_glm.planning import kv_cache
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.memory import (
    ReserveInputs,
    index_score_bytes,
    plan_memory,
    reserve_bytes_by_part,
)
from sglang_glm.planning.released import load_config

GLM = load_config("zai-org/GLM-5.3")
H200 = find_gpu("h200")
MIB = 2**20
DP8 = ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all")


def make_plan(layout=DP8, gpu=H200, chunk_tokens=8192, max_graph_batch=8, **kwargs):
    arguments = {"precision": "fp8", "kv_dtype": "fp8_packed", "with_mtp": True} | kwargs
    return plan_memory(
        GLM,
        layout,
        gpu,
        reserve=ReserveInputs(chunk_tokens=chunk_tokens, max_graph_batch=max_graph_batch),
        **arguments,
    )


@pytest.mark.parametrize("layout", [DP8, ParallelLayout(tp_size=8, ep_size=8)])
def test_parts_add_up_to_the_gpu(layout):
    plan = make_plan(layout)
    total = plan.weights_bytes + plan.reserve_bytes + plan.driver_bytes + plan.kv_pool_bytes
    assert total == pytest.approx(H200.memory_bytes)
    used = (plan.tokens_per_group + 64) * plan.kv_bytes_per_token
    assert 0 <= plan.kv_pool_bytes - used < 64 * plan.kv_bytes_per_token


def test_mem_fraction_leaves_at_least_the_reserve():
    plan = make_plan()
    available = H200.memory_bytes - plan.driver_bytes
    left = available * (1 - plan.mem_fraction_static)
    assert plan.reserve_bytes <= left < plan.reserve_bytes + 0.001 * available


def test_four_requests_of_a_million_tokens_on_eight_h200():
    layout = ParallelLayout(tp_size=8, ep_size=8, dcp_size=8)
    assert make_plan(layout, chunk_tokens=4096).requests_that_fit(1_048_576) == 4
    # A whole copy per GPU does not fit once.
    assert make_plan(DP8).requests_that_fit(1_048_576) == 0


def test_dcp_splits_only_the_latent_rows_of_the_target():
    layout = ParallelLayout(tp_size=8, ep_size=8, dcp_size=8)
    per_gpu = kv_cache.kv_bytes_per_token_per_gpu(GLM, layout, "fp8_packed", with_mtp=True)
    assert per_gpu == 656 * 78 / 8 + 132 * 21 + 656 + 132
    without = kv_cache.kv_bytes_per_token_per_gpu(GLM, layout, "fp8_packed", with_mtp=False)
    assert per_gpu - without == 788


def test_attention_tp_does_not_shrink_the_cache():
    layout = ParallelLayout(tp_size=8)
    per_gpu = kv_cache.kv_bytes_per_token_per_gpu(GLM, layout, "bf16", with_mtp=False)
    assert per_gpu == kv_cache.kv_bytes_per_token(GLM, "bf16", with_mtp=False)


@given(context=st.integers(1, 300_000), overhang=st.integers(0, 8))
def test_requests_round_up_to_pages_inside_a_group(context, overhang):
    plan = make_plan()
    pages = -(-(context + overhang) // 64)
    per_group = plan.tokens_per_group // 64 // pages
    assert plan.requests_that_fit(context, overhang_tokens=overhang) == 8 * per_group


def test_reserve_follows_the_server_rule():
    inputs = ReserveInputs(chunk_tokens=8192, max_graph_batch=32)
    parts = reserve_bytes_by_part(DP8, H200, inputs)
    expected_mib = 512 + 1.5 * 8192 + 1024 + (2 * 32 + 1536 + 3 * 32 * 8) + 2048
    assert sum(parts.values()) == expected_mib * MIB
    # The floor of 10 GiB on large GPUs, to which DeepEP's buffers are added.
    small = reserve_bytes_by_part(
        ParallelLayout(tp_size=8), H200, ReserveInputs(chunk_tokens=2048, max_graph_batch=1)
    )
    assert sum(small.values()) == 10 * 1024 * MIB
    many = reserve_bytes_by_part(DP8, H200, ReserveInputs(chunk_tokens=8192, max_graph_batch=512))
    assert many["graphs"] == (2 * 512 + 1536 + 4.5 * 512 * 8) * MIB


@pytest.mark.parametrize(
    ("gpu", "layout", "precision"),
    [
        ("h100", ParallelLayout(tp_size=8, ep_size=8), "fp8"),
        ("h200", ParallelLayout(tp_size=8, ep_size=8), "bf16"),
    ],
)
def test_weights_that_do_not_fit_are_refused(gpu, layout, precision):
    with pytest.raises(ValueError, match=r"weights need .* GB on each of 8 GPUs.*use more GPUs"):
        make_plan(layout, find_gpu(gpu), precision=precision)


def test_two_nodes_of_h100_fit():
    layout = ParallelLayout(tp_size=16, attn_dp_size=16, ep_size=16, moe_dispatch="all_to_all")
    plan = make_plan(layout, find_gpu("h100"), chunk_tokens=2048, max_graph_batch=2)
    assert plan.tokens_per_group > 0


def test_score_rows_are_padded():
    assert index_score_bytes(3, 257) == 3 * 512 * 4


def test_unknown_row_format():
    with pytest.raises(ValueError, match="kv_dtype is 'fp4'"):
        kv_cache.latent_row_bytes(GLM, "fp4")  # type: ignore[arg-type]
