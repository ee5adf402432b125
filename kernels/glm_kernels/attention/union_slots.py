"""Union of the selections of a request's draft tokens, so that each cache row is gathered once."""

from __future__ import annotations

import torch

from glm_kernels import _arch
from glm_kernels._checks import Dims, require
from glm_kernels._jit import header, load_kernel
from glm_kernels.attention.union_slots_ref import union_slots_ref

MAX_TOKENS = 8
_MAX_ENTRIES = 16384
_BUCKET_BYTES = 4 * (8192 + 512)  # of block_sort.cuh


def union_slots(
    slots: torch.Tensor, next_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Join the selections of each request's ``next_n`` tokens.

    ::

        list[b]    = sorted(set(slots[b * next_n : (b + 1) * next_n]) - {-1})
        members[b] = bit t set where token t of the request selected the entry

    Args:
        slots: ``[batch_size * next_n, k]``, int32 physical slots below 2**28, -1 for none anywhere;
            no slot twice in a row.
        next_n: tokens a request, 1 to 8.

    Returns:
        lists: ``[batch_size, next_n * k]``, int32, ascending.
        members: ``[batch_size, next_n * k]``, uint8.
        counts: ``[batch_size]``, int32, entries in use. Past them lists and members are
            unspecified.

    Raises:
        ValueError: on a shape or dtype mismatch, or too many tokens.

    Notes:
        One plan serves every layer that shares the selection.
    """
    op = "union_slots"
    dims = Dims(op)
    dims.check("slots", slots, ("num_tokens", "k"), (torch.int32,))
    require(op, 1 <= next_n <= MAX_TOKENS, f"next_n is {next_n}, expected 1 to {MAX_TOKENS}")
    num_tokens = dims["num_tokens"]
    require(op, num_tokens % next_n == 0, f"{num_tokens} rows are not a multiple of {next_n}")
    entries = next_n * dims["k"]
    if not _arch.use_device_code(op, slots) or entries > _MAX_ENTRIES or num_tokens == 0:
        lists, members, counts = union_slots_ref(slots.cpu(), next_n)
        return lists.to(slots.device), members.to(slots.device), counts.to(slots.device)
    batch_size = num_tokens // next_n
    lists = torch.empty(batch_size, entries, dtype=torch.int32, device=slots.device)
    members = torch.empty(batch_size, entries, dtype=torch.uint8, device=slots.device)
    counts = torch.empty(batch_size, dtype=torch.int32, device=slots.device)
    scratch = torch.empty(batch_size, entries, dtype=torch.int32, device=slots.device)
    size = 1 << max(11, (entries - 1).bit_length())
    kernel = load_kernel(
        "union_slots",
        "union_slots_kernel",
        8 * size + _BUCKET_BYTES,
        (("SIZE", size),),
        header("order") + header("block_sort"),
        device_index=slots.device.index or 0,
    )
    kernel.launch(
        (batch_size, 1, 1),
        512,
        [slots.contiguous(), scratch, lists, members, counts, next_n, dims["k"]],
    )
    return lists, members, counts
