"""Collectives of SGLang's process groups over gloo.

SGLang wraps several of them in custom operators, which it registers for CUDA's dispatch key, and two of
variable length call PyNccl by name. Gloo has every one of them, or what they can be made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.distributed.parallel_state import GroupCoordinator


def call_collectives_directly() -> None:
    """Let all-gather and reduce-scatter go to torch.distributed, as SGLang's own CPU engine does."""
    from sglang.srt.distributed import parallel_state

    parallel_state._is_cpu = True


def check_direct_collectives() -> str | None:
    """None when the flag of `call_collectives_directly` stands."""
    from sglang.srt.distributed import parallel_state

    return None if parallel_state._is_cpu is True else f"_is_cpu is {parallel_state._is_cpu!r}"


def initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND hook: build SGLang's groups, one for decode context parallelism included.

    SGLang names the devices that it has kernels for and stops on any other. Its group itself needs
    none of them; this question is the only one that the function puts to `is_cuda`.
    """
    from sglang.srt.distributed import parallel_state

    stock = parallel_state.is_cuda
    parallel_state.is_cuda = lambda: True
    try:
        original(*args, **kwargs)
    finally:
        parallel_state.is_cuda = stock


def inplace_all_reduce(tensor: torch.Tensor, group_name: str) -> None:
    """Sum `tensor` over the group of that name, in place.

    Raises:
        RuntimeError: the group does not exist any more.
    """
    from sglang.srt.distributed.parallel_state import _groups

    reference = _groups.get(group_name)
    group = reference() if reference is not None else None
    if group is None:
        raise RuntimeError(
            f"all-reduce over process group {group_name!r}: it was destroyed; known are {[*_groups]}"
        )
    dist.all_reduce(tensor, group=group.device_group)


def all_to_all_single(self: GroupCoordinator, output: torch.Tensor, input: torch.Tensor) -> None:
    """Send the i-th of `world_size` equal parts of `input` to rank i; `output` holds what arrived, by rank."""
    if self.world_size == 1:
        output.copy_(input)
        return
    dist.all_to_all_single(output, input, group=self.device_group)


def all_gatherv(
    self: GroupCoordinator,
    input_: torch.Tensor | list[torch.Tensor],
    sizes: Sequence[int] | None = None,
    output: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gather a different number of rows from each rank.

    Args:
        self: SGLang's group.
        input_: `[rows, ...]`, or a list of tensors that each have this rank's number of rows.
        sizes: Rows of each rank; None when all have as many as this one.
        output: `[sum(sizes), ...]` to write to, for a single input.

    Returns:
        One `[sum(sizes), ...]` per input, rows in rank order.

    Raises:
        ValueError: this rank's rows are not those that `sizes` names.
    """
    inputs = [input_] if isinstance(input_, torch.Tensor) else input_
    if output is not None and len(inputs) != 1:
        raise ValueError(
            f"all_gatherv: output is given with {len(inputs)} inputs, expected one input"
        )
    gathered = []
    for tensor in inputs:
        rows = list(sizes) if sizes is not None else [tensor.shape[0]] * self.world_size
        _check_rows("all_gatherv", tensor.shape[0], rows[self.rank_in_group], self.rank_in_group)
        target = tensor.new_empty(sum(rows), *tensor.shape[1:]) if output is None else output
        _gather_padded(self, tensor, rows, target)
        gathered.append(target)
    return gathered


def _gather_padded(
    group: GroupCoordinator, tensor: torch.Tensor, rows: list[int], target: torch.Tensor
) -> None:
    # Gloo gathers blocks of one size only; the longest rank's is sent by all.
    longest = max(rows)
    block = tensor.new_zeros(longest, *tensor.shape[1:])
    block[: tensor.shape[0]] = tensor
    blocks = tensor.new_empty(group.world_size, longest, *tensor.shape[1:])
    group.all_gather_into_tensor(blocks.flatten(0, 1), block)
    for own, count, part in zip(blocks, rows, target.split(rows), strict=True):
        part.copy_(own[:count])


def reduce_scatterv(
    self: GroupCoordinator,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Sum over ranks, then keep this rank's rows.

    Args:
        self: SGLang's group.
        input_: `[sum(sizes), ...]`, the same rows on every rank.
        output: `[sizes[rank], ...]` to write to.
        sizes: Rows that each rank keeps; None splits evenly.

    Returns:
        `[sizes[rank], ...]`, `output` where given.

    Raises:
        ValueError: the rows cannot be split so.
    """
    rows = (
        list(sizes) if sizes is not None else [input_.shape[0] // self.world_size] * self.world_size
    )
    _check_rows("reduce_scatterv", input_.shape[0], sum(rows), self.rank_in_group)
    # Every rank adds in the same order this way, which gloo's own reduce-scatter does not promise.
    return self._deterministic_reduce_scatterv(input_, output, rows)


def _check_rows(what: str, got: int, expected: int, rank: int) -> None:
    if got != expected:
        raise ValueError(f"{what}: rank {rank} holds {got} rows, expected {expected} by sizes")
