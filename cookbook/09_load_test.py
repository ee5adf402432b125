"""A load test with SGLang's own driver.

Needs:  a running server whose tokenizer is on this machine (or --tokenizer NAME).
Run:    python cookbook/09_load_test.py --url http://127.0.0.1:30000 --concurrency 16
Expect: every request completed; time to first token, time per token, throughput. Random tokens: say
        nothing about accept lengths with them (see 06).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe import expect, get, parser, run

SHOWN = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "time to first token, mean ms",
    "p99_ttft_ms": "time to first token, p99 ms",
    "mean_tpot_ms": "time per output token, mean ms",
    "accept_length": "accept length",
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--requests", type=int, default=64)
    made.add_argument("--concurrency", type=int, default=16)
    made.add_argument("--input-tokens", type=int, default=2000)
    made.add_argument("--output-tokens", type=int, default=256)
    made.add_argument("--tokenizer", help="default: the server's model path")
    arguments = made.parse_args()
    model = get(arguments.url, "/model_info").json()["model_path"]

    with tempfile.TemporaryDirectory() as workspace:
        result = Path(workspace) / "result.jsonl"
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        command += ["--base-url", arguments.url, "--model", model]
        command += ["--tokenizer", arguments.tokenizer or model, "--dataset-name", "random-ids"]
        command += ["--num-prompts", str(arguments.requests)]
        command += ["--max-concurrency", str(arguments.concurrency)]
        command += ["--random-input-len", str(arguments.input_tokens)]
        command += ["--random-output-len", str(arguments.output_tokens)]
        command += ["--random-range-ratio", "1", "--warmup-requests", "1"]
        command += ["--output-file", str(result)]
        print("+", *command)
        done = subprocess.run(command, text=True, capture_output=True)
        expect(
            done.returncode == 0,
            f"bench_serving ended with {done.returncode}:\n{done.stderr[-800:]}",
        )
        figures = json.loads(result.read_text().splitlines()[-1])
    for name, meaning in SHOWN.items():
        if figures.get(name) is not None:
            print(f"{meaning:<34}{figures[name]:>12.2f}")
    expect(
        figures["completed"] == arguments.requests,
        f"{figures['completed']} of {arguments.requests} requests completed",
    )


if __name__ == "__main__":
    run(main)
