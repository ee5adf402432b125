"""The collectives that the planner prices, at a few sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang_glm.planning.hardware import COLLECTIVE_LATENCY_US, find_gpu

if TYPE_CHECKING:
    from tests.gpu.parallel.ranks import Ranks

#: Of one rank's message.
SIZES = (16_384, 262_144, 4 << 20, 64 << 20)


def run(ranks: Ranks, sizes: tuple[int, ...] = SIZES) -> None:
    """Time all-gather, all-reduce, reduce-scatter and all-to-all of BF16 messages."""
    n, link = ranks.world_size, find_gpu("h200").link_bytes_per_s
    for size in sizes:
        own = torch.ones(size // 2, dtype=torch.bfloat16, device=ranks.device)
        whole = own.new_empty(n * own.numel())
        arrived = torch.empty_like(own)
        # What each sends: to all others its message, or all others' shares of it.
        for op, call, sent in (
            (
                "all_gather",
                lambda o=own, w=whole: dist.all_gather_into_tensor(w, o),
                size * (n - 1),
            ),
            ("all_reduce", lambda o=own: dist.all_reduce(o), 2 * size * (n - 1) / n),
            (
                "reduce_scatter",
                lambda o=own, w=whole: dist.reduce_scatter_tensor(o, w),
                size * (n - 1),
            ),
            (
                "all_to_all",
                lambda o=own, a=arrived: dist.all_to_all_single(a, o),
                size * (n - 1) / n,
            ),
        ):
            times = ranks.times_us(call, graph=True)
            ranks.row(
                op=op,
                form="nccl" if ranks.device == "cuda" else "gloo",
                shape=f"{n} ranks, {size} bytes each",
                dtype="bf16",
                **times,
                bytes=int(sent),
                predicted_us=round(COLLECTIVE_LATENCY_US + 1e6 * sent / link, 2),
                max_error=0.0,
            )
