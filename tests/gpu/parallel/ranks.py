"""What the parts of a measurement share: the group, times over all ranks, rows of results."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.gpu.parallel.link_counter import sent_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WARM_UPS, REPEATS = 5, 20
#: Calls in one graph. Even: DeepEP's low-latency calls alternate between two buffers, and a graph must
#: end where it began.
GRAPH_CALLS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank's view of the group that measures.

    Attributes:
        device: "cuda", or "cpu" to try the program out over gloo.
        rows_path: Where rank 0 appends rows, at once: what was measured survives a later failure.
        commit: Of the measured sources.
    """

    rank: int
    world_size: int
    device: str
    rows_path: Path
    commit: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def rank_in_group(self) -> int:
        """The name that SGLang's group has for it."""
        return self.rank

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """As SGLang's group."""
        dist.all_gather_into_tensor(output, input)

    @property
    def gpu(self) -> str:
        """Number and name of the devices."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        return f"{self.world_size}x {name}"

    def say(self, text: str) -> None:
        """Print for the log, from rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def row(self, **values: Any) -> None:
        """Append one row of results."""
        if self.rank != 0:
            return
        base = {"gpu": self.gpu, "commit": self.commit, "versions": self.versions}
        with self.rows_path.open("a") as sink:
            sink.write(json.dumps({**values, **base}) + "\n")
        self.say(" ".join(f"{key}={value}" for key, value in values.items()))

    def most(self, value: float) -> float:
        """The largest of the ranks' values."""
        tensor = torch.tensor(float(value), device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def times_us(
        self, run: Callable[[], object], *, graph: bool = False, repeats: int = REPEATS
    ) -> dict[str, Any]:
        """Time of one call on the stream, host waits included, every rank starting together.

        Args:
            run: The call.
            graph: Replay `GRAPH_CALLS` of it from a CUDA graph where it can be captured, as decode
                does: the host's launches and the start of a measurement are then no part of it.
            repeats: Calls, or replays, that are timed.

        Returns:
            `time_us` and `p90_us`: median and 90th percentile of this rank's calls, the slowest
            rank's of each; `launch`, "graph" or "eager"; `link_bytes` that a call put on NVLink by
            the driver's count, the largest of the ranks, None where it does not count.
        """
        for _ in range(WARM_UPS):
            run()
        launch, calls = "eager", 1
        if graph and self.device == "cuda":
            replay = self._capture(run)
            # All ranks replay, or none: a collective has to be launched alike.
            if not self.most(replay is None):
                run, launch, calls = replay, "graph", GRAPH_CALLS
                run()
        before = sent_bytes()
        times = sorted(self._once_us(run) / calls for _ in range(repeats))
        after = sent_bytes()
        counted = -1.0 if before is None or after is None else (after - before) / (repeats * calls)
        link_bytes = self.most(counted)
        return {
            "time_us": round(self.most(statistics.median(times)), 2),
            "p90_us": round(self.most(times[int(0.9 * (len(times) - 1))]), 2),
            "launch": launch,
            "link_bytes": round(link_bytes) if link_bytes >= 0 else None,
        }

    def _capture(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """`GRAPH_CALLS` calls as a graph's replay, or None where they cannot be captured."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(GRAPH_CALLS):
                    run()
        except RuntimeError as problem:
            self.say(f"not captured: {str(problem)[:200]}")
            return None
        return graph.replay

    def _once_us(self, run: Callable[[], object]) -> float:
        self._meet()
        if self.device == "cpu":
            import time

            started = time.perf_counter()
            run()
            return (time.perf_counter() - started) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _meet(self) -> None:
        """Hold the stream until every rank has come here."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device == "cuda":
            torch.cuda.synchronize()


def installed(*names: str) -> dict[str, str]:
    """Versions of distributions, those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
