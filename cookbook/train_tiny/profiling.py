"""What steps of training spend the GPU's time on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def profile_steps(step: Callable[[], object], steps: int = 2) -> dict[str, Any]:
    """Profile some steps.

    Args:
        step: Runs one.
        steps: How many.

    Returns:
        Milliseconds a step by the clock and on the GPU, kernels a step, peak memory, and the
        kernels that take longest: name, milliseconds and launches a step.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.synchronize()
        began = time.time()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        took = time.time() - began
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)

    def per_step(microseconds: float) -> float:
        return round(microseconds / 1000 / steps, 2)

    return {
        "ms_per_step": per_step(took * 1e6),
        "device_ms_per_step": per_step(sum(row.self_device_time_total for row in rows)),
        "kernels": sum(row.count for row in rows) // steps,
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "top": [
            (row.key[:90], per_step(row.self_device_time_total), row.count // steps)
            for row in rows[:16]
        ],
    }
