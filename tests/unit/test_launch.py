"""Every launch script composes a command that SGLang takes as it is meant.

test_resolved         SGLang's own resolution on pretended H200s keeps what was asked for
test_planned          where a script names its plan, the plan holds what the script admits
test_1m_context_fits  the cache of the two-stage shape, computed
test_help             a shape says what it is
test_overrides        arguments replace the script's own
test_contradictions   each is refused in a sentence, before anything starts
test_more_dispatch_*  a variable of the caller counts
test_needs_its_gpus   too few GPUs are refused
test_needs_what_*     a missing interpreter, SGLang or checkpoint is named before anything starts
test_check_allocated* an address that does not answer
test_router           the router's command, and two nodes that are one
test_allocated*       what /server_info must say, and what each wrong figure is called
test_scripts          valid shell, executable unless another sources it
test_pair             the two halves of a pair name one cache, one division and the same drafts
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_glm.cli import plan as plan_command
from sglang_glm.planning import hardware, kv_cache, memory, weights
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import RELEASED, load_config
from sglang_glm.verification.local_server import free_port
from tests.support.launch_scripts import (
    LAUNCH,
    SHAPES,
    SOURCED,
    check_allocated,
    compose,
    expected_kv_tokens,
    plan_arguments,
    run_script,
)
from tests.support.pretend_h200 import resolve_on_h200

CHECK = check_allocated()
MODEL = "zai-org/GLM-5.3"


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What became of every shape's command."""
    model = tmp_path_factory.mktemp("glm")
    (model / "config.json").write_text(json.dumps(RELEASED[MODEL]))
    cases = []
    for name in SHAPES:
        # Parsers are looked up in the checkpoint's chat template, which is not here.
        composed = compose(
            name,
            *("--model-path", str(model), "--reasoning-parser", "glm45"),
            *("--tool-call-parser", "glm47"),
        )
        read = [CHECK.COMPARED[flag] for flag in composed.flags() if flag in CHECK.COMPARED]
        read.append("attn_dp_size")
        cases.append((composed.env, composed.argv, read))
    return dict(zip(SHAPES, resolve_on_h200(cases), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_resolved(resolved: dict[str, dict], name: str) -> None:
    assert "resolved" in resolved[name], resolved[name]
    got = resolved[name]["resolved"]
    asked = compose(name).flags()
    # The scheduler's own limit is known after start only; the resolved one counts all groups.
    got["internal_states"] = [{}]
    got["max_running_requests"] = int(asked["--max-running-requests"]) // got["attn_dp_size"]
    asked.pop("--cuda-graph-max-bs-decode", None)
    agreed, wrong = CHECK.differences(asked, {**got, "max_total_num_tokens": 10**7})
    assert wrong == [] and len(agreed) >= 7


PLANNED = [name for name in SHAPES if plan_arguments(name) is not None]


@pytest.mark.parametrize("name", PLANNED)
def test_planned(name: str) -> None:
    parser = argparse.ArgumentParser()
    plan_command.configure(parser)
    arguments = parser.parse_args([MODEL, *(plan_arguments(name) or ())])
    plan = plan_command.make_plan(arguments)
    composed = compose(name)
    assert plan.requests_that_fit() >= int(composed.value("--max-running-requests"))
    asked = float(composed.value("--mem-fraction-static"))
    assert asked <= plan.memory.mem_fraction_static + 0.0005
    assert int(composed.flags().get("--tp-size") or 1) == plan.setup.layout.tp_size
    assert int(composed.flags().get("--attn-dp-size") or 1) == plan.setup.layout.attn_dp_size
    assert int(composed.flags().get("--ep-size") or 1) == plan.setup.layout.ep_size
    # What a lower fraction takes from the cache, and a tenth for what the plan does not know.
    lost = (plan.memory.mem_fraction_static - asked) * plan.memory.gpu_bytes
    tokens = plan.memory.tokens_per_group - lost / plan.memory.kv_bytes_per_token
    assert 0.8 * tokens <= expected_kv_tokens(name) <= tokens
    longest = int(composed.value("--context-length"))
    assert longest <= expected_kv_tokens(name), "a request of full length would never run"


def test_1m_context_fits() -> None:
    name = "serve_h200x8_1m_context.sh"
    composed, config, gpu = compose(name), load_config(MODEL), hardware.find_gpu("h200")
    stages = [int(layers) for layers in composed.env["SGLANG_PP_LAYER_PARTITION"].split(",")]
    assert sum(stages) == config.num_hidden_layers and len(stages) == 2
    assert config.indexer_types[stages[0]] == "full", "a stage must not start on a shared layer"
    layout = ParallelLayout(tp_size=4)
    whole = sum(
        weights.weight_bytes_per_gpu(config, layout, "fp8", with_mtp=False).values()
    ) + weights.absorbed_bytes_per_gpu(config, layout, with_mtp=False)
    per_token = kv_cache.kv_bytes_per_token_per_gpu(config, layout, "fp8_packed", with_mtp=False)
    reserve = sum(
        memory.reserve_bytes_by_part(
            layout, gpu, memory.ReserveInputs(chunk_tokens=4096, max_graph_batch=4)
        ).values()
    )
    # The larger stage, and an embedding or a head with it.
    share = max(stages) / config.num_hidden_layers
    head = 2 * config.vocab_size * config.hidden_size / 4
    left = gpu.memory_bytes - memory.DRIVER_BYTES - reserve - whole * share - head
    assert left / (per_token * share) >= expected_kv_tokens(name) >= 1_048_576 + 64


def test_help() -> None:
    for name in SHAPES:
        result = run_script(name, "--help")
        assert result.returncode == 0 and "--dry-run" in result.stdout


def test_overrides() -> None:
    composed = compose("serve_cpu.sh", "--model", "/m", "--port", "31000", "--skip-server-warmup")
    assert composed.value("--model-path") == "/m" and composed.argv.count("--model-path") == 1
    assert composed.value("--port") == "31000" and composed.argv[-1] == "--skip-server-warmup"
    composed = compose("serve_h200x8_balanced.sh", "--port=31000", "--served-model-name=a=b")
    assert composed.value("--port") == "31000" and composed.value("--served-model-name") == "a=b"
    assert "serve_cpu.sh" in os.listdir(LAUNCH) and compose("serve.sh").argv[0] == "--model-path"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("serve_h200x8_low_latency.sh", "--tp-size 4", "is not 8"),
        ("serve_h200x8_balanced.sh", "--ep-size 4", "one group of experts a GPU"),
        ("serve_h200x8_balanced.sh", "--attn-dp-size 3", "does not divide"),
        ("serve_h200x8_balanced.sh", "--max-running-requests 60", "not a multiple"),
        ("serve_h200x8_balanced.sh", "--max-running-requests 128", "without a graph"),
        (
            "serve_h200x8_balanced.sh",
            "--max-running-requests 1024 --cuda-graph-max-bs-decode 128",
            "NUM_MAX_DISPATCH",
        ),
        ("serve_h200x8_low_latency.sh", "--speculative-eagle-topk 4", "chain, not a tree"),
        ("serve_h200x8_low_latency.sh", "--speculative-num-steps 3", "verifies 4"),
        ("serve_h200x8_throughput.sh", "--speculative-num-steps 3", "without --speculative-algo"),
        ("serve_h100x16.sh", "--kv-cache-dtype bfloat16", "packed FP8 rows"),
        ("serve_h200x8_1m_context.sh", "--speculative-algorithm EAGLE --speculative-num-steps 1"
         " --speculative-num-draft-tokens 2", "SGLANG_ENABLE_PP_SPEC=1"),
        ("serve_h100x16.sh", "--dist-init-addr", "needs --dist-init-addr"),
        ("serve_h100x16.sh", "--node-rank 2", "--node-rank 2 of 2 node(s)"),
        ("serve_cpu.sh", "stray", "unexpected argument 'stray'"),
        ("serve_cpu.sh", "--tp-size eight", "--tp-size is 'eight'; give a whole number from 1"),
        ("serve_cpu.sh", "--attn-dp-size 0", "give a whole number from 1"),
        ("serve_cpu.sh", "--max-running-requests 08", "give a whole number from 0"),
        ("serve_cpu.sh", "--port abc", "--port is 'abc'"),
        ("serve_cpu.sh", "--ready-timeout soon", "give whole seconds"),
        ("serve_cpu.sh", "--python", "--python needs a value"),
        ("serve_h200x8_balanced.sh", "--tp-size=4", "is not 8"),
    ],
)  # fmt: skip
def test_contradictions(name: str, arguments: str, said: str) -> None:
    result = run_script(name, "--dry-run", *arguments.split())
    assert result.returncode == 2
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


def test_more_dispatch_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that the caller sets counts, though the shape does not name it."""
    monkeypatch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "256")
    more = ("--max-running-requests", "1024", "--cuda-graph-max-bs-decode", "128")
    assert compose("serve_h200x8_balanced.sh", *more).value("--max-running-requests") == "1024"


def test_needs_its_gpus() -> None:
    result = run_script("serve_h200x8_low_latency.sh", "--port", "1")
    assert result.returncode == 2 and "8" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--python none/python", "none/python is no program; run 'make install'"),
        ("--python /usr/bin/env", "/usr/bin/env has no sglang"),
        (f"--python {sys.executable} --model-path /none", "--model-path /none does not exist"),
    ],
)
def test_needs_what_it_starts(arguments: str, said: str) -> None:
    result = run_script("serve_cpu.sh", "--port", str(free_port()), *arguments.split())
    assert result.returncode == 2 and said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_router() -> None:
    script = LAUNCH / "serve_h200x8_pd_router.sh"
    words = [str(script), "http://p:30000", "http://d:30000", "--dry-run"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0
    assert "--prefill http://p:30000 8998 --decode http://d:30000" in result.stdout
    same = subprocess.run([*words[:2], words[1]], capture_output=True, text=True)
    assert same.returncode == 2 and "both" in same.stderr
    for arguments, said in (
        ([], "needs two addresses"),
        (["--prefill", "http://p:1"], "'--prefill' is no address"),
    ):
        result = subprocess.run([str(script), *arguments], capture_output=True, text=True)
        assert result.returncode == 2 and said in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_check_allocated_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for arguments, said in (
        ([nobody], "does not answer"),
        (["nonsense"], "does not answer"),
        ([nobody, "--min-kv-tokens", "lots"], "needs a whole number"),
    ):
        assert CHECK.main(arguments) == 2
        wrong = capsys.readouterr().err
        assert said in wrong and len(wrong.splitlines()) == 1


INFO = {
    "tp_size": 8,
    "attn_dp_size": 8,
    "kv_cache_dtype": "fp8_e4m3",
    "context_length": 1000,
    "enable_dp_lm_head": True,
    "max_total_num_tokens": 300_032,
    "internal_states": [
        {
            "effective_max_running_requests_per_dp": 8,
            "decode_cuda_graph_bs": [1, 2, 4, 8],
            "memory_usage": {"weight": 94.5},
        }
    ],
}
ASKED = {
    "--tp-size": "8",
    "--attn-dp-size": "8",
    "--kv-cache-dtype": "fp8_e4m3",
    "--context-length": "1000",
    "--enable-dp-lm-head": "",
    "--max-running-requests": "64",
    "--cuda-graph-max-bs-decode": "8",
    "--model-path": "not compared",
}


def test_allocated() -> None:
    agreed, wrong = CHECK.differences(ASKED, INFO, 290_000)
    assert wrong == [] and len(agreed) == 9


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype: asked for fp8_e4m3"),
        ({"enable_dp_lm_head": False}, "--enable-dp-lm-head: asked for on"),
        ({"max_total_num_tokens": 200_000}, "expected at least 290,000"),
        (
            {"internal_states": [{**INFO["internal_states"][0], "decode_cuda_graph_bs": [1, 4]}]},
            "largest captured batch is 4",
        ),
        (
            {
                "internal_states": [
                    {**INFO["internal_states"][0], "effective_max_running_requests_per_dp": 5}
                ]
            },
            "--max-running-requests: asked for 8, the server has 5",
        ),
    ],
)
def test_allocated_otherwise(changed: dict, said: str) -> None:
    _, wrong = CHECK.differences(ASKED, {**INFO, **changed}, 290_000)
    assert len(wrong) == 1 and said in wrong[0]


def test_pair() -> None:
    prefill, decode = (
        compose(f"serve_h200x8_pd_{half}.sh").flags() for half in ("prefill", "decode")
    )
    differ = {name for name in prefill | decode if prefill.get(name) != decode.get(name)}
    assert differ == {
        "--disaggregation-mode",
        "--disaggregation-bootstrap-port",
        "--deepep-mode",
        "--max-running-requests",
        "--cuda-graph-max-bs-decode",
        "--chunked-prefill-size",
    }


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert os.access(path, os.X_OK) != (path.name in SOURCED)
