"""Memory that must not be read holds NaN, and outputs start as garbage."""

import torch


def poison_unreferenced_rows(kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy of a latent cache whose rows that no slot names are NaN (all-ones bytes when packed).

    Args:
        kv_cache: ``[num_slots, 1, dim]``, float or uint8. All-ones bytes are NaN as e4m3, fp32 and
            bf16 alike.
        slots: any shape, int; negative entries are ignored.

    Returns:
        Tensor of the same shape.
    """
    used = torch.zeros(kv_cache.shape[0], dtype=torch.bool, device=kv_cache.device)
    used[slots[slots >= 0].long().flatten()] = True
    poisoned = kv_cache.clone()
    poisoned[~used] = 255 if kv_cache.dtype == torch.uint8 else float("nan")
    return poisoned


def poison_unused_pages(
    pages: torch.Tensor, cache_seqlens: torch.Tensor, block_table: torch.Tensor
) -> torch.Tensor:
    """Copy of an index cache in which only bytes of positions below each length survive.

    Args:
        pages: ``[num_pages, 8448]``, uint8.
        cache_seqlens: ``[batch_size]``, int.
        block_table: ``[batch_size, max_num_blocks]``, int.

    Returns:
        ``[num_pages, 8448]``, all ones (NaN) everywhere else.
    """
    poisoned = torch.full_like(pages, 255)
    for request, length in enumerate(cache_seqlens.tolist()):
        for block in range(max(0, (length + 63) // 64)):
            page, rows = int(block_table[request, block]), min(64, length - 64 * block)
            poisoned[page, : 128 * rows] = pages[page, : 128 * rows]
            poisoned[page, 8192 : 8192 + 4 * rows] = pages[page, 8192 : 8192 + 4 * rows]
    return poisoned
