"""Serving speed on the CPU beside transformers on the same threads.

    python -m tests.bench.cpu_serving            # appends to docs/bench/cpu_serving.jsonl

Each row is one dtype and batch size: prefill of 1,000 tokens a request, then 100 decode steps.
transformers runs `generate` with its cache in this process, the server answers `/generate`; both
use every core. Medians of three after a warm-up.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_glm.verification.oracle import Oracle
from sglang_glm.verification.prompts import ordinary_vocab, random_prompt
from tests.support.checkpoints import checkpoint
from tests.support.server import Server, ServerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_TOKENS = 1000
DECODE_STEPS = 100
REPEATS = 3
ROWS = Path(__file__).parents[2] / "docs" / "bench" / "cpu_serving.jsonl"


def median_s(run: Callable[[int], None]) -> float:
    """Median seconds of `run(repeat)`, the first call left out."""
    times = []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        run(repeat)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def prompts(vocab: int, batch: int, repeat: int) -> list[list[int]]:
    """Fresh prompts for every repeat, so that no prefix is reused."""
    return [random_prompt(vocab, PROMPT_TOKENS, 1000 * repeat + index) for index in range(batch)]


def time_server(server: Server, vocab: int, batch: int) -> tuple[float, float]:
    """Seconds of a prefill and of prefill plus `DECODE_STEPS` steps."""

    def run(new_tokens: int, repeat: int) -> None:
        server.flush_cache()
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        server.post(
            "/generate", input_ids=prompts(vocab, batch, repeat), sampling_params=params
        ).raise_for_status()

    return median_s(lambda r: run(1, r)), median_s(lambda r: run(1 + DECODE_STEPS, r))


def time_transformers(oracle: Oracle, vocab: int, batch: int) -> tuple[float, float]:
    """The same two times for transformers' own generation."""

    def run(new_tokens: int, repeat: int) -> None:
        ids = torch.tensor(prompts(vocab, batch, repeat))
        with torch.inference_mode():
            oracle.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    return median_s(lambda r: run(1, r)), median_s(lambda r: run(1 + DECODE_STEPS, r))


def row(dtype: str, batch: int, server: Server, ours: tuple, theirs: tuple) -> dict:
    """One result row; rates are tokens a second over the whole batch."""

    def rates(prefill_s: float, total_s: float) -> tuple[float, float]:
        return batch * PROMPT_TOKENS / prefill_s, batch * DECODE_STEPS / (total_s - prefill_s)

    (prefill, decode), (hf_prefill, hf_decode) = rates(*ours), rates(*theirs)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "dtype": dtype,
        "batch": batch,
        "prefill_tokens_per_s": round(prefill, 1),
        "transformers_prefill_tokens_per_s": round(hf_prefill, 1),
        "decode_tokens_per_s": round(decode, 1),
        "transformers_decode_tokens_per_s": round(hf_decode, 1),
        "server_ready_s": round(server.ready_after_s, 1),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {n: importlib.metadata.version(n) for n in ("sglang", "torch", "transformers")},
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Measure both dtypes at batch 1 and 4."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    model = checkpoint("--mtp", "--index-topk", "64")
    vocab = ordinary_vocab(Path(model))
    threads = str(os.cpu_count())
    for dtype in arguments.dtypes:
        oracle = Oracle(Path(model), dtype=getattr(torch, dtype))
        theirs = {batch: time_transformers(oracle, vocab, batch) for batch in (1, 4)}
        server = Server(ServerSpec(model, ("--dtype", dtype), env=(("OMP_NUM_THREADS", threads),)))
        try:
            for batch in (1, 4):
                result = row(dtype, batch, server, time_server(server, vocab, batch), theirs[batch])
                print(json.dumps(result), flush=True)
                with ROWS.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
