"""Which rank holds what.

test_ranks_are_sglangs      attention and expert ranks of every mix are those that SGLang derives
test_everything_held_once   heads and experts are covered exactly once by each group
test_exchanges              the exchanges of dense and sparse layers in every topology
test_refusals               a layout that cannot hold the model; test_layout.py has every impossible mix
test_bind_groups            cores are shared out evenly; more ranks than cores take turns
"""

from __future__ import annotations

import itertools

import pytest

from sglang_glm.checkpoint.hf_config import build_config
from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.tokenizer import SpecialIds
from sglang_glm.compat.host.bootstrap import bind_groups, count_cores
from sglang_glm.config import GlmDsaConfig
from sglang_glm.parallel.plan import ParallelPlan
from sglang_glm.planning.layout import ParallelLayout

CONFIG = GlmDsaConfig.from_hf(
    build_config(CheckpointSpec(num_attention_heads=8), SpecialIds(endoftext=0, stop=(1,)))
)
DENSE, SPARSE = 0, CONFIG.first_k_dense_replace
MIXES = [
    (tp, dp, ep)
    for tp in (1, 2, 4, 8)
    for dp, ep in itertools.product((1, 2, 4, 8), repeat=2)
    if dp <= tp >= ep
]


def plan(tp: int, dp: int = 1, ep: int = 1, **options: object) -> ParallelPlan:
    layout = ParallelLayout(tp_size=tp, attn_dp_size=dp, ep_size=ep, **options)
    return ParallelPlan(config=CONFIG, layout=layout)


@pytest.mark.parametrize(("tp", "dp", "ep"), MIXES)
def test_ranks_are_sglangs(tp: int, dp: int, ep: int) -> None:
    from sglang.srt.runtime_context import derive_attention_ranks, derive_spawn_ranks

    ours = plan(tp, dp, ep)
    for rank in range(tp):
        attn_tp_rank, attn_dp_rank = derive_attention_ranks(
            tp_rank=rank, attn_tp_size=ours.layout.attn_tp_size, attn_cp_size=1
        )
        assert ours.attention_groups[attn_dp_rank][attn_tp_rank] == rank
        ranks = derive_spawn_ranks(
            world_rank=rank,
            tp_size=tp,
            ep_join_rank_offset=0,
            attn_cp_size=1,
            attn_tp_size=ours.layout.attn_tp_size,
            moe_dp_size=1,
            moe_ep_size=ep,
        )
        assert ours.expert_groups[ranks["moe_tp_rank"]][ranks["moe_ep_rank"]] == rank
        assert ours.expert_width_groups[ranks["moe_ep_rank"]][ranks["moe_tp_rank"]] == rank


@pytest.mark.parametrize(("tp", "dp", "ep"), MIXES)
def test_everything_held_once(tp: int, dp: int, ep: int) -> None:
    ours = plan(tp, dp, ep)
    for group in ours.attention_groups:
        assert [h for rank in group for h in ours.heads(rank)] == list(
            range(CONFIG.num_attention_heads)
        )
    for group in ours.expert_groups:
        assert [e for rank in group for e in ours.experts(rank)] == list(
            range(CONFIG.n_routed_experts)
        )
    for group in ours.expert_width_groups:
        assert len({ours.experts(rank) for rank in group}) == 1


EXCHANGES = {
    "one": (plan(1), DENSE, []),
    "tp": (plan(2), SPARSE, [("all_reduce", (0, 1)), ("all_reduce", (0, 1))]),
    "ep": (plan(2, ep=2), SPARSE, [("all_reduce", (0, 1)), ("all_reduce", (0, 1))]),
    "dp": (plan(2, dp=2), DENSE, [("gather", (0, 1)), ("scatter", (0, 1))]),
    "dp_dense_replicated": (plan(2, dp=2, dense_mlp_replicated=True), DENSE, []),
    "dp_of_two": (
        plan(4, dp=2),
        SPARSE,
        [("all_reduce", (2, 3)), ("gather", (0, 1, 2, 3)), ("scatter", (0, 1, 2, 3))],
    ),
    "a2a": (
        plan(2, dp=2, ep=2, moe_dispatch="all_to_all"),
        SPARSE,
        [("dispatch", (0, 1)), ("combine", (0, 1))],
    ),
    "a2a_dense": (
        plan(2, dp=2, ep=2, moe_dispatch="all_to_all"),
        DENSE,
        [("gather", (0, 1)), ("scatter", (0, 1))],
    ),
    "a2a_of_two": (
        plan(4, dp=2, ep=4, moe_dispatch="all_to_all"),
        SPARSE,
        [
            ("all_reduce", (2, 3)),
            ("dispatch", (0, 1, 2, 3)),
            ("combine", (0, 1, 2, 3)),
            ("gather", (2, 3)),
        ],
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges(name: str) -> None:
    ours, layer_id, expected = EXCHANGES[name]
    last_rank = ours.layout.tp_size - 1
    assert [(e.operation, e.ranks) for e in ours.exchanges(layer_id, last_rank)] == expected


def test_refusals() -> None:
    layout = ParallelLayout(tp_size=3)
    with pytest.raises(ValueError, match="num_attention_heads 8 cannot be divided among 3 ranks"):
        ParallelPlan(config=CONFIG, layout=layout)


def test_bind_groups() -> None:
    assert bind_groups(2, [0, 1]) == "0|1"
    assert bind_groups(2, [0, 1, 2, 3, 8]) == "0,1|2,3,8"
    assert bind_groups(4, [3, 5]) == "3|5|3|5"
    assert [count_cores(part) for part in bind_groups(3, list(range(8))).split("|")] == [2, 3, 3]
    assert count_cores("0-3,8,10-11") == 7
