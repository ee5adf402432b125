"""CPU cores of each rank."""

from __future__ import annotations

import itertools
import os

import torch

BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def bind_groups(num_ranks: int, cpu_ids: list[int]) -> str:
    """Cores of every rank in the form of `SGLANG_CPU_OMP_THREADS_BIND`.

    Args:
        num_ranks: Processes that share this machine.
        cpu_ids: Cores that this process may use.

    Returns:
        Comma-separated ids of each rank, ranks separated by `|`: a contiguous share each, or one core
        in turn where ranks outnumber cores.
    """
    if num_ranks >= len(cpu_ids):
        return "|".join(str(cpu_ids[rank % len(cpu_ids)]) for rank in range(num_ranks))
    bounds = [rank * len(cpu_ids) // num_ranks for rank in range(num_ranks + 1)]
    return "|".join(
        ",".join(map(str, cpu_ids[start:end])) for start, end in itertools.pairwise(bounds)
    )


def share_cores(num_ranks: int) -> None:
    """Divide the cores among ranks unless the user did.

    SGLang gives each rank a NUMA node by itself, and refuses more ranks than nodes.
    """
    if num_ranks > 1:
        os.environ.setdefault(
            BIND_VARIABLE, bind_groups(num_ranks, sorted(os.sched_getaffinity(0)))
        )


def count_cores(bound: str) -> int:
    """Number of cores in a rank's list, as `0,1,4-7`."""
    count = 0
    for part in bound.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def init_cpu_threads_env(
    *, local_omp_cpuid: str | None, dist_init_method: str | None = None
) -> None:
    """Give this rank as many threads as it has cores; `OMP_NUM_THREADS` wins."""
    if local_omp_cpuid and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(count_cores(local_omp_cpuid))
