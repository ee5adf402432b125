"""Recommended flags: SGLang's own parser accepts them, and they say what was planned."""

import argparse
import dataclasses

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_glm.planning import flags
from sglang_glm.planning.experts import UniformRouting
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.plan import Workload, build_plan
from sglang_glm.planning.released import load_config
from sglang_glm.planning.speculation import MtpShape
from sglang_glm.planning.traffic import ModelSetup

DP8 = ParallelLayout(tp_size=8, attn_dp_size=8, ep_size=8, moe_dispatch="all_to_all")


def make_plan(layout=DP8, gpu="h200", model="zai-org/GLM-5.3", precision="fp8", **changes):
    setup = ModelSetup(
        config=load_config(model),
        layout=layout,
        precision=precision,
        kv_dtype="fp8_packed",
        routing=UniformRouting(),
    )
    workload = Workload(
        context_tokens=32_768,
        concurrency=64,
        chunk_tokens=8192,
        mtp=MtpShape(num_steps=5, num_draft_tokens=6),
    )
    return build_plan(setup, find_gpu(gpu), dataclasses.replace(workload, **changes))


def value_of(words, flag):
    return words[words.index(flag) + 1]


def test_flags_of_the_balanced_shape():
    words = flags.launch_flags(make_plan(), "zai-org/GLM-5.3")
    assert " ".join(words) == (
        "--model-path zai-org/GLM-5.3 --tp-size 8 --attn-dp-size 8 --ep-size 8 "
        "--moe-a2a-backend deepep --kv-cache-dtype fp8_e4m3 --context-length 32768 "
        "--max-running-requests 64 --cuda-graph-max-bs-decode 8 --chunked-prefill-size 8192 "
        f"--mem-fraction-static {make_plan().memory.mem_fraction_static} "
        "--speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6"
    )


def test_admission_is_capped_by_what_fits():
    plan = make_plan(context_tokens=131_072)
    fits = plan.requests_that_fit()
    assert fits < 64
    words = flags.launch_flags(plan, "m")
    assert value_of(words, "--max-running-requests") == str(fits)
    assert value_of(words, "--cuda-graph-max-bs-decode") == str(fits // 8)


def test_admission_is_the_same_in_every_group():
    words = flags.launch_flags(make_plan(concurrency=20, context_tokens=8192), "m")
    assert value_of(words, "--max-running-requests") == "16"
    fewer_than_groups = flags.launch_flags(make_plan(concurrency=3, context_tokens=8192), "m")
    assert value_of(fewer_than_groups, "--max-running-requests") == "8"


def test_dispatch_buffers_hold_the_verify_rows():
    assert flags.environment(make_plan(concurrency=64)) == {}
    plan = make_plan(concurrency=256, context_tokens=8192)
    assert flags.decode_rows_per_rank(plan) == 192
    assert flags.environment(plan) == {flags.DEEPEP_MAX_TOKENS_VARIABLE: "256"}
    assert flags.environment(make_plan(ParallelLayout(tp_size=8), concurrency=256)) == {}


def test_online_quantisation_and_optional_switches():
    layout = dataclasses.replace(DP8, dense_mlp_replicated=True, lm_head_per_attn_group=True)
    words = flags.launch_flags(make_plan(layout, model="zai-org/GLM-5.2"), "m")
    assert value_of(words, "--quantization") == "fp8"
    assert value_of(words, "--moe-dense-tp-size") == "1"
    assert "--enable-dp-lm-head" in words
    assert "--speculative-algorithm" not in flags.launch_flags(make_plan(mtp=None), "m")


def test_nodes():
    layout = ParallelLayout(tp_size=16, attn_dp_size=16, ep_size=16, moe_dispatch="all_to_all")
    plan = make_plan(layout, gpu="h100", context_tokens=4096, concurrency=16, chunk_tokens=2048)
    assert value_of(flags.launch_flags(plan, "m"), "--nnodes") == "2"


def test_nothing_is_recommended_that_cannot_start():
    with pytest.raises(ValueError, match=r"no request of 1,048,576 tokens fits"):
        flags.launch_flags(make_plan(context_tokens=1_048_576), "m")
    sharded = ParallelLayout(tp_size=8, ep_size=8, dcp_size=8)
    with pytest.raises(ValueError, match="need Blackwell"):
        flags.launch_flags(make_plan(sharded), "m")
    words = flags.launch_flags(make_plan(sharded, gpu="b200"), "m")
    assert value_of(words, "--dcp-size") == "8"


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(make_plan(), id="dp8"),
        pytest.param(make_plan(ParallelLayout(tp_size=8), mtp=None), id="tp8"),
        pytest.param(
            make_plan(
                dataclasses.replace(DP8, dense_mlp_replicated=True, lm_head_per_attn_group=True),
                model="zai-org/GLM-5.2",
            ),
            id="all switches",
        ),
        pytest.param(make_plan(ParallelLayout(tp_size=8, dcp_size=8), gpu="b200"), id="dcp"),
    ],
)
def test_sglang_parses_the_flags(plan):
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(flags.launch_flags(plan, "zai-org/GLM-5.3"))
    layout = plan.setup.layout
    assert (parsed.tp_size, parsed.attn_dp_size) == (layout.tp_size, layout.attn_dp_size)
    assert (parsed.ep_size, parsed.dcp_size) == (layout.ep_size, layout.dcp_size)
    assert parsed.mem_fraction_static == plan.memory.mem_fraction_static
    assert parsed.context_length == plan.workload.context_tokens
