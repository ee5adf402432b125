"""Union of the selections of a request's tokens, with Python sets."""

import torch


def union_slots_ref(
    slots: torch.Tensor, next_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loop form of ``union_slots``; the unused tail of its results is zero.

    Args:
        slots: ``[batch_size * next_n, k]``, int32, -1 for none.
        next_n: tokens a request.

    Returns:
        ``[batch_size, next_n * k]`` int32 slots and uint8 members, ``[batch_size]`` int32 counts.
    """
    batch_size, k = slots.shape[0] // next_n, slots.shape[1]
    lists = torch.zeros(batch_size, next_n * k, dtype=torch.int32)
    members = torch.zeros(batch_size, next_n * k, dtype=torch.uint8)
    counts = torch.zeros(batch_size, dtype=torch.int32)
    for request in range(batch_size):
        chosen: dict[int, int] = {}
        for token in range(next_n):
            for slot in slots[request * next_n + token].tolist():
                if slot >= 0:
                    chosen[slot] = chosen.get(slot, 0) | 1 << token
        for at, slot in enumerate(sorted(chosen)):
            lists[request, at] = slot
            members[request, at] = chosen[slot]
        counts[request] = len(chosen)
    return lists, members, counts
