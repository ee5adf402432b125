"""What one prefill chunk costs after a growing history, and which kernels that time is in.

    python -m tests.gpu.serving.run --out FOLDER --configs fp8-mtp --only ours --profile-prefill

The plan counts index scoring and selection of a chunk at the rates of the decode kernels. Long prompts take far
longer than that (docs/planning.md); a chunk whose kernels fill its time has a slow kernel, one whose kernels do not
waits for the host.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.serving.traffic import prompt

if TYPE_CHECKING:
    from tests.support.server import Server

#: Names of a trace that are told; the others are summed.
TOLD = 12
TRACE_TIMEOUT_S = 120


def chunk_times(server: Server, ids: list[int], chunk: int) -> dict[int, float]:
    """Milliseconds of each chunk of a prompt, by the history before it.

    Args:
        server: Idle, with a prefix cache.
        ids: The prompt; a part chunk at its end is left out.
        chunk: `--chunked-prefill-size`, whole pages.
    """
    server.flush_cache()
    return {
        start: _milliseconds(server, ids[: start + chunk])
        for start in range(0, len(ids) - chunk + 1, chunk)
    }


def _milliseconds(server: Server, ids: list[int]) -> float:
    response = server.post(
        "/generate", input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 1}
    )
    response.raise_for_status()
    return round(1e3 * response.json()["meta_info"]["e2e_latency"], 2)


def traced_chunk(server: Server, ids: list[int], chunk: int, activity: str) -> dict[str, Any]:
    """The last chunk of a prompt under SGLang's profiler.

    Args:
        server: Idle, with a prefix cache.
        ids: The prompt.
        chunk: Its last tokens, whole pages; those before them are put in the cache first.
        activity: "GPU", or "CPU" where there is none.

    Returns:
        `history`, `elapsed_ms`, and of the trace what `kernel_times` says.
    """
    server.flush_cache()
    _milliseconds(server, ids[:-chunk])
    with tempfile.TemporaryDirectory() as folder:
        body = {"output_dir": folder, "activities": [activity]}
        server.post("/start_profile", **body).raise_for_status()
        elapsed_ms = _milliseconds(server, ids)
        server.post("/stop_profile").raise_for_status()
        events = _events(Path(folder))
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if activity == "GPU" else ("cpu_op",)
    return {
        "history": len(ids) - chunk,
        "elapsed_ms": elapsed_ms,
        **kernel_times(events, kinds),
    }


def _events(folder: Path) -> list[dict[str, Any]]:
    """All events of the trace, once the server has written it to its end."""
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while time.monotonic() < deadline:
        for path in folder.rglob("*.trace.json.gz"):
            try:
                return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            except (EOFError, OSError, json.JSONDecodeError):
                pass  # still being written
        time.sleep(0.25)
    raise RuntimeError(f"no trace within {TRACE_TIMEOUT_S} s in {folder}")


def kernel_times(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Sum a trace by kernel.

    Args:
        events: Of a Chrome trace, `dur` in microseconds.
        kinds: Values of `cat` that count.

    Returns:
        `busy_ms` over all kernels and `kernels_ms`, the longest by name.
    """
    sums: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in kinds:
            sums[event["name"]] += event["dur"]
    longest = {name[:120]: round(us / 1e3, 3) for name, us in sums.most_common(TOLD)}
    return {"busy_ms": round(sum(sums.values()) / 1e3, 3), "kernels_ms": longest}


def profile(server: Server, context: int, chunk: int, activity: str = "GPU") -> dict[str, Any]:
    """Both figures for one prompt of `context` tokens."""
    ids = prompt(context, 5000)
    whole = len(ids) // chunk * chunk
    return {
        "chunk_ms": chunk_times(server, ids[:whole], chunk),
        "traced": traced_chunk(server, ids[:whole], chunk, activity),
    }
