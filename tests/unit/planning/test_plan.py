"""A whole plan: MTP accounting, prefill sums, predictions against measured rows, the documents."""

import dataclasses
from pathlib import Path

import pytest

from sglang_glm.planning import roofline, validation
from sglang_glm.planning.experts import UniformRouting
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.plan import Workload, build_plan
from sglang_glm.planning.released import load_config
from sglang_glm.planning.speculation import MtpShape, break_even_accept_length
from sglang_glm.planning.traffic import ModelSetup

REPOSITORY = Path(__file__).parents[3]
GLM = load_config("zai-org/GLM-5.3")
CHAIN = MtpShape(num_steps=5, num_draft_tokens=6)


def make_plan(config=GLM, layout=None, **changes):
    setup = ModelSetup(
        config=config,
        layout=layout
        or ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all"),
        precision="fp8",
        kv_dtype="fp8_packed",
        routing=UniformRouting(),
    )
    workload = Workload(context_tokens=32_768, concurrency=32, chunk_tokens=8192, mtp=CHAIN)
    return build_plan(setup, find_gpu("h200"), dataclasses.replace(workload, **changes))


def test_mtp_round_is_one_verify_and_five_draft_passes():
    plan = make_plan()
    assert [(phase.name, phase.repeats) for phase in plan.mtp_round] == [
        ("verify", 1),
        ("draft extend", 1),
        ("draft step", 4),
    ]
    verify, extend, step = plan.mtp_round
    decode_flops = {term.name: term.flops for term in plan.decode.terms}
    for term in verify.terms:
        assert term.flops == pytest.approx(6 * decode_flops[term.name])
    scoring = [any(t.name == "index scoring" for t in p.terms) for p in (extend, step)]
    assert scoring == [True, False], "draft steps reuse the round's selection"


def test_draft_steps_score_when_the_checkpoint_does_not_share():
    config = dataclasses.replace(GLM, index_share_for_mtp_iteration=False)
    step = make_plan(config).mtp_round[2]
    assert any(term.name == "index scoring" for term in step.terms)


def test_one_step_chain_has_no_further_draft_steps():
    plan = make_plan(mtp=MtpShape(num_steps=1, num_draft_tokens=2))
    assert [phase.name for phase in plan.mtp_round] == ["verify", "draft extend"]


def test_break_even_is_the_ratio_of_times():
    plan = make_plan()
    rates = roofline.IDEAL_RATES
    ratio = plan.phases_us(plan.mtp_round, rates) / plan.phases_us([plan.decode], rates)
    assert plan.break_even_accept_length(rates) == pytest.approx(ratio)
    assert 1 < ratio < CHAIN.max_accept_length
    assert make_plan(mtp=None).break_even_accept_length(rates) is None


def test_break_even_refuses_nonsense():
    with pytest.raises(ValueError, match="expected positive"):
        break_even_accept_length(1.0, 0.0)
    with pytest.raises(ValueError, match="num_steps is 0"):
        MtpShape(num_steps=0, num_draft_tokens=1)
    with pytest.raises(ValueError, match="num_draft_tokens is 5"):
        MtpShape(num_steps=5, num_draft_tokens=5)


def test_prefill_chunks_cover_the_prompt_once():
    plan = make_plan(context_tokens=3000, concurrency=8, mtp=None)
    rates = roofline.KernelRates(other_us_per_pass=1e9)
    # 8192 / 8 groups = 1024 tokens a group and chunk: three passes.
    assert plan.prefill_us(rates) == pytest.approx(3e9, rel=1e-3)


def test_longer_context_costs_only_the_indexer():
    short, long = make_plan(context_tokens=8192), make_plan(context_tokens=131_072)
    growth = {
        ours.name: theirs.hbm_bytes / ours.hbm_bytes
        for ours, theirs in zip(short.decode.terms, long.decode.terms)
    }
    assert {name for name, ratio in growth.items() if ratio != 1} == {
        "index scoring",
        "top-k selection",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 0}, "context_tokens is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"context_tokens": 1_048_577}, "max_position_embeddings=1048576"),
    ],
)
def test_impossible_workloads(changes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**changes)


def test_mtp_without_the_layer():
    with pytest.raises(ValueError, match=r"no MTP layer.*drop the MTP options"):
        make_plan(dataclasses.replace(GLM, num_nextn_predict_layers=0))


def test_layout_is_checked_against_the_model():
    config = dataclasses.replace(GLM, n_routed_experts=12)
    with pytest.raises(ValueError, match="n_routed_experts 12"):
        make_plan(config)


COMPARISONS = [item for row in validation.SERVER_ROWS for item in validation.compare(row)]


@pytest.mark.parametrize(
    ("figure", "item"),
    COMPARISONS,
    ids=[f"{i.row.context_tokens}x{i.row.batch} {figure}" for figure, i in COMPARISONS],
)
def test_prediction_against_measured_rows(figure, item):
    assert item.roofline_ms < item.row.ms_per_step, "the roofline is a lower bound"
    if figure.startswith("prefill") and item.row.context_tokens < 8192:
        # One short chunk is host and launch time, which the plan does not model.
        assert item.error < -0.5
    else:
        assert abs(item.error) < 0.30


def test_document_shows_the_current_comparison():
    text = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
    assert validation.render_table() in text, (
        "paste validation.render_table() into docs/planning.md"
    )
