"""Impossible mixes are refused in one sentence that names both numbers."""

import dataclasses

import pytest

from sglang_glm.planning import weights
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config

GLM = load_config("zai-org/GLM-5.3")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, "--tp 0: expected at least 1"),
        ({"tp_size": 8, "attn_dp_size": 3}, "--attn-dp-size 3 with --tp 8"),
        ({"tp_size": 8, "ep_size": 16}, "--ep-size 16 with --tp 8"),
        ({"tp_size": 8, "attn_dp_size": 8, "dcp_size": 2}, "--dcp-size 2 with 1 ranks"),
        (
            {"tp_size": 8, "ep_size": 4, "moe_dispatch": "all_to_all"},
            "--ep-size 4 with --moe-a2a-backend and --tp 8",
        ),
        ({"moe_dispatch": "all_to_all"}, "--moe-a2a-backend with --tp 1"),
        ({"tp_size": 12}, "--tp 12 over nodes of 8 GPUs"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ({"tp_size": 128, "ep_size": 128}, {}, "num_attention_heads 64 .* 128 ranks"),
        (
            {"tp_size": 8, "attn_dp_size": 8, "ep_size": 8},
            {"n_routed_experts": 12},
            "n_routed_experts 12 .* 8 ranks",
        ),
        ({"tp_size": 8}, {"moe_intermediate_size": 100}, "moe_intermediate_size 100 .* 8 ranks"),
        ({"tp_size": 8}, {"intermediate_size": 100}, "intermediate_size 100 .* 8 ranks"),
    ],
)
def test_layouts_that_do_not_fit_the_model(layout, change, message):
    config = dataclasses.replace(GLM, **change)
    with pytest.raises(ValueError, match=message) as failure:
        ParallelLayout(**layout).check(config)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("layout", "module"),
    [
        ({"tp_size": 32, "ep_size": 1}, "mlp.experts.gate_proj has 64 of 2048 rows"),
        ({"tp_size": 64, "ep_size": 64}, "kv_b_proj has 448 of 28672 rows"),
    ],
)
def test_fp8_blocks_are_not_cut(layout, module):
    layout = ParallelLayout(**layout)
    layout.check(GLM)
    with pytest.raises(ValueError, match=module):
        weights.check_fp8_blocks(GLM, layout)


@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 16}, {"tp_size": 32, "ep_size": 32, "moe_dispatch": "all_to_all"}],
)
def test_fp8_blocks_that_stay_whole(layout):
    weights.check_fp8_blocks(GLM, ParallelLayout(**layout))


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp_size": 8}, {"tp_size": 16, "attn_dp_size": 16, "ep_size": 16}, {"tp_size": 16}],
)
def test_possible_layouts(layout):
    ParallelLayout(**layout).check(GLM)


def test_derived_sizes():
    layout = ParallelLayout(tp_size=16, attn_dp_size=4, ep_size=8)
    assert (layout.attn_tp_size, layout.moe_tp_size, layout.num_nodes) == (4, 2, 2)
    assert (layout.shared_experts_tp_size, layout.dense_mlp_tp_size) == (16, 16)
    spread = ParallelLayout(
        tp_size=8,
        attn_dp_size=8,
        ep_size=8,
        moe_dispatch="all_to_all",
        dense_mlp_replicated=True,
        lm_head_per_attn_group=True,
    )
    assert (spread.shared_experts_tp_size, spread.dense_mlp_tp_size) == (1, 1)
    assert spread.lm_head_tp_size == 1
