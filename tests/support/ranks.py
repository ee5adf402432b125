"""Runs a function as several ranks, each a process."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 300


def run_ranks(
    program: Callable[[int], Any], world_size: int = 2, backend: str = "gloo"
) -> list[Any]:
    """Call `program(rank)` in `world_size` processes with a default process group.

    Args:
        program: A function of a module, so that a fresh interpreter can import it.
        world_size: Number of ranks.
        backend: "gloo", or "nccl" with a GPU for each rank.

    Returns:
        What each rank returned, pickled. An exception of one rank is raised here.
    """
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_rank, (program, world_size, backend, directory), nprocs=world_size)
        return [pickle.loads(Path(directory, str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int, program: Callable[[int], Any], world_size: int, backend: str, directory: str
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )
    try:
        Path(directory, str(rank)).write_bytes(pickle.dumps(program(rank)))
        # A rank that leaves first would break the collective that another is still in.
        dist.barrier()
    finally:
        dist.destroy_process_group()
