"""What SGLang's argument resolution makes of parallel flags once the plugin is loaded.

test_refused        an impossible mix ends the start in one sentence that names the flag
test_resolved       the all-to-all takes all ranks for experts and turns graphs off; cores are shared out,
                    also over pipeline stages; a stock mix is left as it is
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import checkpoint

ROOT = Path(__file__).parents[2]

EAGLE = (
    "--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-num-steps 1 "
    "--speculative-num-draft-tokens 2"
)
#: Flags of each case; `--env` names a variable.
CASES = {
    "ep3": "--tp 4 --ep-size 3",
    "a2a_alone": "--moe-a2a-backend glm_a2a",
    "a2a_half": "--tp 4 --ep-size 2 --moe-a2a-backend glm_a2a",
    "heads": "--tp 8",
    "dcp_comm": "--tp 2 --dcp-size 2 --dcp-comm-backend a2a",
    "dcp_dp": "--tp 2 --dcp-size 2 --attn-dp-size 2",
    "prefill_cp": "--tp 2 --enable-prefill-cp --attn-cp-size 2 --cp-strategy zigzag",
    "pp_drafts": f"--pp-size 2 {EAGLE}",
    "pp_partition": "--pp-size 3 --env SGLANG_PP_LAYER_PARTITION=4,4",
    "pp_drafts_dp": f"--pp-size 2 --tp 2 --attn-dp-size 2 {EAGLE} --env SGLANG_ENABLE_PP_SPEC=1",
    "pp_drafts_on": f"--pp-size 2 {EAGLE} --env SGLANG_ENABLE_PP_SPEC=1",
    "pp": "--pp-size 2",
    "a2a": "--tp 2 --attn-dp-size 2 --moe-a2a-backend glm_a2a",
    "dp": "--tp 2 --attn-dp-size 2",
    "one": "",
}

PROGRAM = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args
cases, model, found = json.loads(sys.argv[1]), sys.argv[2], {}
for name, flags in cases.items():
    flags, _, variable = flags.partition(" --env ")
    for leftover in ("CPU_OMP_THREADS_BIND", "PP_LAYER_PARTITION", "ENABLE_PP_SPEC"):
        os.environ.pop(f"SGLANG_{leftover}", None)
    if variable:
        os.environ.__setitem__(*variable.split("="))
    try:
        server_args = prepare_server_args(["--model", model, *flags.split()])
        server_args.resolve_once()
        view = resolved_view(server_args)
    except ValueError as error:
        found[name] = str(error)
        continue
    found[name] = {
        "ep_size": view.ep_size,
        "moe_a2a_backend": view.moe_a2a_backend,
        "graphs": [view.cuda_graph_config.decode.backend, view.cuda_graph_config.prefill.backend],
        "groups": os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "").count("|") + 1,
    }
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            json.dumps(CASES),
            checkpoint("--mtp", "--index-topk", "16"),
        ],
        env=dict(os.environ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.rsplit("FOUND", 1)[1])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("ep3", "--ep-size 3 with --tp 4"),
        ("a2a_alone", "--moe-a2a-backend with --tp 1"),
        ("a2a_half", "--ep-size 2 with --moe-a2a-backend and --tp 4"),
        ("heads", "num_attention_heads 4 cannot be divided among 8 ranks"),
        ("dcp_comm", "--dcp-comm-backend a2a: on the CPU parts of a history are joined by ag_rs"),
        ("dcp_dp", "--dcp-size 2 with 1 ranks in an attention group"),
        ("prefill_cp", "--cp-strategy zigzag with --enable-prefill-cp: on the CPU"),
        ("pp_drafts", "--speculative-algorithm EAGLE with --pp-size 2: SGLang relays drafts"),
        ("pp_partition", "SGLANG_PP_LAYER_PARTITION=4,4: expected 3 positive numbers"),
        ("pp_drafts_dp", "--speculative-algorithm EAGLE with --pp-size 2 and --attn-dp-size 2"),
    ],
)
def test_refused(found: dict, case: str, message: str) -> None:
    assert found[case].startswith(message)
    assert found[case].count(". ") == 0


def test_resolved(found: dict) -> None:
    assert found["a2a"]["ep_size"] == 2
    assert found["a2a"]["moe_a2a_backend"] == "glm_a2a"
    assert set(found["a2a"]["graphs"]) == {"disabled"}
    assert found["a2a"]["groups"] == 2
    assert found["dp"]["ep_size"] == 1 and found["dp"]["moe_a2a_backend"] == "none"
    assert found["one"]["groups"] == 1
    assert found["pp"]["groups"] == found["pp_drafts_on"]["groups"] == 2
