"""What a server is asked: the same tokens of every server, and seconds a step."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import time
from typing import TYPE_CHECKING, Any

from tests.gpu.serving.shapes import VOCAB

if TYPE_CHECKING:
    from tests.support.server import Server

#: Lengths of the compared prompts: below index_topk, across it while decoding, and beyond.
COMPARED = (40, 700, 2030, 2100, 5000, 9000, 20_000)
COMPARED_TOKENS = 32
SHORT, LONG, REPEATS = 8, 136, 3


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(100, VOCAB - 100) for _ in range(length)]


def prompts(context: int, batch: int) -> list[list[int]]:
    """The prompts of a load."""
    return [prompt(context, 1000 + index) for index in range(batch)]


def answers(
    server: Server, lengths: tuple[int, ...] = COMPARED, *, together: bool = False
) -> list[dict[str, Any]]:
    """Greedy tokens, their log-probabilities, and the gap to the second best at each.

    Args:
        server: Who is asked.
        lengths: Of the prompts.
        together: All in one request, instead of one after the other.
    """
    asked = [prompt(length, seed) for seed, length in enumerate(lengths)]
    if together:
        # Prompt log-probabilities are not asked for: they would keep prefixes from being reused.
        found = server.generate(asked, logprob_start_len=-1, max_new_tokens=COMPARED_TOKENS)
    else:
        found = [
            server.generate(ids, logprob_start_len=len(ids) - 1, max_new_tokens=COMPARED_TOKENS)
            for ids in asked
        ]
    return [_told(length, answer) for length, answer in zip(lengths, found, strict=True)]


def _told(length: int, answer: dict[str, Any]) -> dict[str, Any]:
    chosen = answer["meta_info"]["output_token_logprobs"]
    best = answer["meta_info"]["output_top_logprobs"]
    return {
        "length": length,
        "tokens": [entry[1] for entry in chosen],
        "logprobs": [entry[0] for entry in chosen],
        "gaps": [top[0][0] - top[1][0] for top in best],
    }


def compare(peer: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """How far two servers agree, token for token up to the first difference of each prompt.

    Returns:
        Tokens compared and equal, the largest difference of log-probability of equal tokens, and
        for each prompt that parts the peer's gap between its two best tokens there.
    """
    equal = total = 0
    worst, partings = 0.0, []
    for a, b in zip(peer, ours, strict=True):
        for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            total += 1
            if x != y:
                partings.append({"length": a["length"], "at": i, "gap": round(a["gaps"][i], 4)})
                break
            equal += 1
            worst = max(worst, abs(a["logprobs"][i] - b["logprobs"][i]))
    return {
        "tokens_compared": total,
        "tokens_equal": equal,
        "max_logprob_difference": round(worst, 4),
        "partings": partings,
    }


def measure(server: Server, context: int, batch: int) -> dict[str, float]:
    """Prefill seconds, then milliseconds a decode step or a verify round with the prefix cached.

    Args:
        server: An idle server.
        context: Tokens of each prompt.
        batch: Prompts at once.

    Returns:
        `prefill_s`, `ms_per_step`, `tokens_per_step` of one request.
    """
    server.flush_cache()
    ids = prompts(context, batch)
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

    def run(new_tokens: int) -> tuple[float, float]:
        body = {"input_ids": ids, "sampling_params": {**params, "max_new_tokens": new_tokens}}
        start = time.perf_counter()
        response = server.post("/generate", **body)
        seconds = time.perf_counter() - start
        response.raise_for_status()
        metas = [answer["meta_info"] for answer in response.json()]
        steps = [m.get("spec_verify_ct") or m["completion_tokens"] - 1 for m in metas]
        # The server's own clock leaves out the parsing of long prompts.
        return max(m.get("e2e_latency", seconds) for m in metas), max(steps)

    prefill_s, _ = run(1)
    run(SHORT)
    short = [run(SHORT) for _ in range(REPEATS)]
    long = [run(LONG) for _ in range(REPEATS)]
    seconds = statistics.median(s for s, _ in long) - statistics.median(s for s, _ in short)
    steps = statistics.median(n for _, n in long) - statistics.median(n for _, n in short)
    return {
        "prefill_s": round(prefill_s, 3),
        "ms_per_step": round(1e3 * seconds / steps, 4),
        "tokens_per_step": round((LONG - SHORT) / steps, 3),
    }


def memory_mib() -> int | None:
    """Memory in use on the first visible GPU, or None without `nvidia-smi`."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True).stdout.split()[0])
    except (OSError, IndexError, ValueError):
        return None
