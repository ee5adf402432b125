"""Kernel times from CUDA-graph replays, with a warm or a cold L2 cache."""

import statistics
from collections.abc import Callable

import torch

LAUNCHES = 10
REPLAYS = 7
FLUSH_BYTES = 256 << 20


def warm_time_us(
    run: Callable[[], object], launches: int = LAUNCHES, replays: int = REPLAYS
) -> float:
    """Median time of one call, inputs as the previous call left them in the cache.

    Args:
        run: the call; everything that it launches is captured.
        launches: calls in a graph.
        replays: replays of which the median is taken.

    Returns:
        Microseconds.
    """
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def cold_time_us(run: Callable[[], object], replays: int = 15) -> float:
    """Median time of one call after the L2 cache was overwritten.

    Args:
        run: the call.
        replays: measurements of which the median is taken.

    Returns:
        Microseconds, the launch of the graph included.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(replays):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
