"""Recommended flags: SGLang's own resolution accepts them, and they say what was planned.

`tests/server/test_launch.py::test_recommended_flags_serve` starts a server with some.
"""

import argparse
import dataclasses
import json
import shlex

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_glm.cli import plan as plan_command
from sglang_glm.planning import flags
from sglang_glm.planning.experts import UniformRouting
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.plan import Plan, Workload, build_plan
from sglang_glm.planning.released import RELEASED, load_config
from sglang_glm.planning.speculation import MtpShape
from sglang_glm.planning.traffic import ModelSetup
from tests.support.plans import DOCUMENT_EXAMPLES, HELP_EXAMPLES, make_parser
from tests.support.pretend_h200 import resolve_on_h200

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


#: Command lines whose recommendation SGLang must take: those of help and document, and their kin.
COMMANDS = [
    *HELP_EXAMPLES,
    *DOCUMENT_EXAMPLES,
    *(
        f"zai-org/{model} --tp 8 {layout} {load}"
        for model in ("GLM-5.3", "GLM-5.2")
        for layout in (
            "--weights fp8",
            "--weights fp8 --ep 8",
            "--weights fp8 --attn-dp-size 2 --ep 8 --moe-a2a-backend none",
            "--weights fp8 --attn-dp-size 8 --ep 8 --moe-dense-tp-size 1 --enable-dp-lm-head",
            "--weights fp8 --attn-dp-size 4 --ep 8 --moe-a2a-backend deepep",
        )
        for load in (
            "--context 8k --concurrency 256 --mtp-steps 1 --chunked-prefill-size 4096",
            "--context 16k --concurrency 8 --mtp-steps 0 --kv-cache-dtype bfloat16",
        )
    ),
]
READ = {
    "tp_size": "--tp-size",
    "attn_dp_size": "--attn-dp-size",
    "ep_size": "--ep-size",
    "moe_a2a_backend": "--moe-a2a-backend",
    "kv_cache_dtype": "--kv-cache-dtype",
    "context_length": "--context-length",
    "max_running_requests": "--max-running-requests",
    "mem_fraction_static": "--mem-fraction-static",
    "speculative_num_steps": "--speculative-num-steps",
    "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> dict[str, tuple[Plan, list[str], dict]]:
    """Each command line to its plan, its recommended words, and what SGLang made of them."""
    by_gpu: dict[str, dict] = {"H200": {}, "B200": {}}
    folders = {}
    for command in COMMANDS:
        arguments = make_parser().parse_args(shlex.split(command))
        if arguments.compare or arguments.expert_record or arguments.model not in RELEASED:
            continue  # they name files of the reader
        plan = plan_command.make_plan(arguments)
        if plan.setup.layout.dcp_size > 1 and plan.gpu.architecture == "hopper":
            continue  # the plan says why there is nothing to recommend
        if arguments.model not in folders:
            folder = tmp_path_factory.mktemp("model")
            (folder / "config.json").write_text(json.dumps(RELEASED[arguments.model]))
            folders[arguments.model] = str(folder)
        words = flags.launch_flags(plan, folders[arguments.model])
        gpu = "B200" if plan.gpu.architecture == "blackwell" else "H200"
        by_gpu[gpu][command] = (plan, words)
    found = {}
    for gpu, plans in by_gpu.items():
        cases = [(flags.environment(plan), words, list(READ)) for plan, words in plans.values()]
        outcomes = resolve_on_h200(cases, gpu)
        for (command, (plan, words)), outcome in zip(plans.items(), outcomes, strict=True):
            found[command] = (plan, words, outcome)
    return found


def test_sglang_resolves_the_flags(resolved):
    """SGLang's own resolution and this package's refusals take them, and change nothing."""
    assert len(resolved) >= 25
    for command, (plan, words, outcome) in resolved.items():
        assert "resolved" in outcome, f"{command}: {outcome}"
        got = outcome["resolved"]
        for field, flag in READ.items():
            if flag in words:
                assert str(got[field]) == value_of(words, flag), f"{command}: {flag}"
        layout = plan.setup.layout
        assert (got["tp_size"], got["ep_size"]) == (layout.tp_size, layout.ep_size), command


@pytest.mark.parametrize("layout", [ParallelLayout(tp_size=8, dcp_size=8)], ids=["dcp"])
def test_sglang_parses_the_flags(layout):
    plan = make_plan(layout, gpu="b200")
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(flags.launch_flags(plan, "zai-org/GLM-5.3"))
    assert parsed.dcp_size == layout.dcp_size
    assert parsed.mem_fraction_static == plan.memory.mem_fraction_static
