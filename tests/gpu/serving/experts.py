"""Which experts the steps and prefill chunks of a load hit, counted by SGLang's own recorder.

The recorder adds kernels to every captured graph, so the servers that are timed run without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_glm.planning.expert_record import RecordedPass, mean_experts_hit, parse_passes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.server import Server

#: Unlimited: the default buffer is a ring, in which the order of the passes is lost.
FLAGS = (
    "--expert-distribution-recorder-mode",
    "stat",
    "--expert-distribution-recorder-buffer-size",
    "-1",
)
NEW_TOKENS = 24


def environment(folder: Path) -> dict[str, str]:
    """Where the server leaves its records; no other server may write there."""
    folder.mkdir(parents=True, exist_ok=True)
    return {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder)}


def record(server: Server, folder: Path, top_k: int, **body: Any) -> list[RecordedPass]:
    """Every pass of the target while the server answers one request.

    Args:
        server: Idle, started with `FLAGS` and `environment(folder)`.
        folder: Emptied of earlier records.
        top_k: Experts that a token chooses.
        body: What is asked of `/generate`.
    """
    for old in folder.glob("expert_distribution_recorder_*.pt"):
        old.unlink()
    for path, content in (
        ("/start_expert_distribution_record", {}),
        ("/generate", body),
        ("/stop_expert_distribution_record", {}),
        ("/dump_expert_distribution_record", {}),
    ):
        server.post(path, **content).raise_for_status()
    (found,) = folder.glob("expert_distribution_recorder_*.pt")
    counts = torch.load(found, map_location="cpu", weights_only=True)["logical_count"]
    return parse_passes(counts.tolist(), top_k)


def experts_hit(
    server: Server,
    folder: Path,
    prompts: list[list[int]],
    *,
    rows_per_request: int,
    chunk: int,
    top_k: int,
) -> dict[str, Any]:
    """What a row of `gpu_serving.jsonl` says of a load: means by layer id.

    Args:
        server: As for `record`.
        folder: As for `record`.
        prompts: Asked at once; the steps counted are those of all of them together.
        rows_per_request: 1, or the draft tokens of a verify round.
        chunk: `--chunked-prefill-size`; the chunks counted are the full ones.
        top_k: Experts that a token chooses.
    """
    server.flush_cache()
    passes = record(
        server,
        folder,
        top_k,
        input_ids=prompts,
        sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS},
    )
    return {
        "experts_hit": _rounded(mean_experts_hit(passes, len(prompts) * rows_per_request)),
        "prefill_experts_hit": _rounded(mean_experts_hit(passes, chunk)),
        "recorded_passes": len(passes),
    }


def _rounded(by_layer: dict[int, float]) -> dict[int, float]:
    return {layer: round(mean, 2) for layer, mean in by_layer.items()}
