"""Which collectives a layout runs, what one GPU sends, and what time that takes."""

import pytest

from sglang_glm.planning.collectives import forward_collectives
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config

GLM = load_config("zai-org/GLM-5.3")
H200 = find_gpu("h200")
HIDDEN_BYTES = 6144 * 2


def calls_of(layout, num_tokens=64, **kwargs):
    calls = forward_collectives(
        GLM, layout, num_tokens=num_tokens, num_logit_rows=num_tokens, **kwargs
    )
    return {(call.name, call.layer_kind): call for call in calls}


def counts(layout, **kwargs):
    return {key: call.count for key, call in calls_of(layout, **kwargs).items()}


def test_one_gpu_sends_nothing():
    assert calls_of(ParallelLayout()) == {}


def test_plain_tp_reduces_twice_a_layer():
    assert counts(ParallelLayout(tp_size=8, ep_size=8)) == {
        ("all-reduce", "after attention"): 78,
        ("all-reduce", "after MLP"): 78,
        ("logits all-gather", "LM head"): 1,
    }


def test_tp_with_all_to_all():
    layout = ParallelLayout(tp_size=8, ep_size=8, moe_dispatch="all_to_all")
    assert counts(layout) == {
        ("all-reduce", "after attention"): 3,
        ("all-reduce", "after MLP"): 3,
        ("reduce-scatter + all-gather", "around MoE"): 75,
        ("dispatch", "MoE"): 75,
        ("combine", "MoE"): 75,
        ("logits all-gather", "LM head"): 1,
    }


def test_dp_attention_gathers_only_for_mlps_that_every_rank_computes():
    sizes = {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8}
    assert counts(ParallelLayout(**sizes))["all-gather", "before MLP"] == 78
    a2a = ParallelLayout(**sizes, moe_dispatch="all_to_all")
    assert counts(a2a)["all-gather", "before MLP"] == 3
    alone = ParallelLayout(
        **sizes,
        moe_dispatch="all_to_all",
        dense_mlp_replicated=True,
        lm_head_per_attn_group=True,
    )
    assert set(counts(alone)) == {("dispatch", "MoE"), ("combine", "MoE")}


def test_mixed_attention_reduces_inside_its_group():
    calls = calls_of(ParallelLayout(tp_size=8, attn_dp_size=4, ep_size=8))
    reduce = calls["all-reduce (attention group)", "after attention"]
    assert (reduce.group_size, reduce.message_bytes) == (2, 64 / 4 * HIDDEN_BYTES)


def test_mtp_layer_has_one_moe():
    layout = ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all")
    assert counts(layout, num_dense_layers=0, num_moe_layers=1) == {
        ("dispatch", "MoE"): 1,
        ("combine", "MoE"): 1,
        ("rows all-gather", "LM head"): 1,
        ("logits all-gather", "LM head"): 1,
    }


def test_bytes_sent_by_one_gpu():
    tp = calls_of(ParallelLayout(tp_size=8))["all-reduce", "after attention"]
    assert tp.sent_bytes_per_gpu == 2 * 7 / 8 * 64 * HIDDEN_BYTES
    layout = ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all")
    dispatch = calls_of(layout)["dispatch", "MoE"]
    # 8 tokens of this GPU, 8 experts each, 7 of 8 destinations are other GPUs.
    assert dispatch.sent_bytes_per_gpu == 8 * 8 * 6144 * 7 / 8
    assert calls_of(layout)["combine", "MoE"].sent_bytes_per_gpu == 2 * 8 * 8 * 6144 * 7 / 8


def test_time_inside_and_across_nodes():
    inside = calls_of(ParallelLayout(tp_size=8), num_tokens=8192)["all-reduce", "after MLP"]
    seconds = 2 * 7 / 8 * 8192 * HIDDEN_BYTES / 450e9
    assert inside.time_us(H200, 8) == pytest.approx(78 * (5 + 1e6 * seconds))
    layout = ParallelLayout(tp_size=16, attn_dp_size=16, ep_size=16, moe_dispatch="all_to_all")
    across = calls_of(layout, num_tokens=8192)["dispatch", "MoE"]
    assert across.crosses_nodes
    leaving = 8192 / 16 * 8 * 6144 * 15 / 16 / 2
    assert across.transfer_us(H200, 8) == pytest.approx(75 * 1e6 * leaving / 50e9)
    assert across.start_up_us == 75 * 15
