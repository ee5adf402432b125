"""The launch scripts on a real server.

test_allocated                what a running server allocated against what was asked for, right and wrong
test_recommended_flags_serve  the flags of `sglang-glm plan` start a server, which has what was planned
test_serve_cpu                (slow) from the script to `Ready`, one answer, and the end of every process
test_lowered                  (slow) a server that could not allocate what was asked for is not left running
"""

import os
import re
import signal
import subprocess
import time
from itertools import pairwise

import pytest
import requests

from sglang_glm.verification.local_server import free_port
from tests.support.checkpoints import checkpoint
from tests.support.launch_scripts import LAUNCH, check_allocated
from tests.support.server import Server
from tests.support.specs import PLANNED, TRUTH_64

SERVER = TRUTH_64
CHECK = check_allocated()


def test_allocated(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--dtype=float32", "--chunked-prefill-size=128", "--dsa-decode-backend=glm_sparse"]
    assert CHECK.main([server.url, "--min-kv-tokens", "20480", *asked]) == 0
    assert "20,480 tokens" in capsys.readouterr().out
    assert CHECK.main([server.url, "--min-kv-tokens", "20481", "--dtype=bfloat16"]) == 1
    wrong = capsys.readouterr().err
    assert "--dtype: asked for bfloat16, the server has float32" in wrong and "20,481" in wrong


@pytest.mark.parametrize("server", [PLANNED], indirect=True, ids=["planned"])
def test_recommended_flags_serve(server: Server) -> None:
    asked = {flag: value for flag, value in pairwise(server.spec.args) if flag in CHECK.COMPARED}
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    agreed, wrong = CHECK.differences(asked, info, min_kv_tokens=8448)
    assert wrong == [] and len(agreed) >= 9, agreed
    assert "--speculative-num-draft-tokens 6" in agreed and "--kv-cache-dtype fp8_e4m3" in agreed
    answer = server.generate(list(range(300, 400)), max_new_tokens=9)
    assert len(answer["output_ids"]) == 9 and answer["meta_info"]["spec_verify_ct"] >= 1


def start(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    port = free_port()
    process = subprocess.Popen(
        [str(LAUNCH / "serve_cpu.sh"), "--port", str(port), *arguments],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, port


@pytest.mark.slow
def test_serve_cpu() -> None:
    process, port = start("--model-path", checkpoint("--mtp", "--index-topk", "64"))
    assert process.stdout is not None
    try:
        seen = ""
        for line in process.stdout:
            seen += line if "server_args=" not in line else ""
            if line.startswith("Ctrl-C"):
                break
        assert "Ready." in seen, seen[-3000:]
        assert "allocated as asked for:" in seen and "speculative-num-steps 3" in seen
        (command,) = re.findall(r"^  (curl .*\n.*)$", seen, re.MULTILINE)
        answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
        assert '"completion_tokens":' in answer.stdout
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        with pytest.raises(requests.ConnectionError):
            requests.get(f"http://127.0.0.1:{port}/health", timeout=5)
    finally:
        with pytest.raises(ProcessLookupError):
            for _ in range(50):
                os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.2)


@pytest.mark.slow
def test_lowered() -> None:
    """A cache smaller than one request of the context length is said, and nothing stays."""
    process, port = start(
        *("--model-path", checkpoint("--mtp", "--index-topk", "64"), "--max-total-tokens", "8192")
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "less than one request of --context-length 16,384" in output
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/health", timeout=5)
