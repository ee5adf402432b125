"""The host tier's copies on the CPU: SGLang's are CUDA kernels over pinned memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POOL_HOST = "sglang.srt.mem_cache.pool_host"


def _rows(buffer: torch.Tensor) -> torch.Tensor:
    """`[num_rows, row_bytes]` uint8 view of a buffer whose first dimension counts rows."""
    return buffer.view(buffer.shape[0], -1).view(torch.uint8)


def _paged_rows(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """`[num_pages, num_layers, page_size, row_bytes]` uint8 view of a page-first buffer."""
    return buffer.view(buffer.shape[0], buffer.shape[1], page_size, -1).view(torch.uint8)


def transfer_kv_direct(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows between two buffers a layer, byte for byte; their dtypes may differ.

    Args:
        src_layers: `[num_src_rows, ...]` each.
        dst_layers: `[num_dst_rows, ...]` each, rows of as many bytes. Written.
        src_indices: `[num_rows]`.
        dst_indices: `[num_rows]`.
        page_size: Rows that lie next to each other; unused, since rows are copied one by one.
    """
    for src, dst in zip(src_layers, dst_layers, strict=True):
        _rows(dst)[dst_indices] = _rows(src)[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer's rows out of page-first buffers.

    Args:
        src_ptrs: `[num_pages, num_layers, page_size, ...]` each.
        dst_ptrs: `[num_rows, ...]` each. Written.
        src_indices: `[num_tokens]`, rows of the source counted over pages.
        dst_indices: `[num_tokens]`.
        layer_id: The source's layer.
        page_size: Rows a page of the source.
    """
    pages, offsets = src_indices // page_size, src_indices % page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        _rows(dst)[dst_indices] = _paged_rows(src, page_size)[pages, layer_id, offsets]


def transfer_kv_all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the rows of all layers into one page-first buffer.

    Args:
        src_ptrs: `[num_rows, ...]`, one a layer.
        dst_ptrs: One buffer, `[num_pages, num_layers, page_size, ...]`. Written.
        src_indices: `[num_tokens]`.
        dst_indices: `[num_tokens]`, rows of the target counted over pages.
        page_size: Rows a page of the target.
    """
    pages, offsets = dst_indices // page_size, dst_indices % page_size
    (host,) = dst_ptrs
    target = _paged_rows(host, page_size)
    for layer, src in enumerate(src_ptrs):
        target[pages, layer, offsets] = _rows(src)[src_indices]


def allocate_pageable(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Allocate a host pool's buffer in ordinary memory: pinning needs a CUDA driver.

    Args:
        dims: Shape.
        dtype: Element type.
        device: "cpu".
        pin_memory: Asked for by SGLang, and not done.
        allocator: SGLang's allocator for the storage backend.
        registration_granularity_bytes: Unused.
    """
    return allocator.allocate(dims, dtype=dtype, device=device)


_TRANSFERS: tuple[Callable[..., None], ...] = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
)
#: The host pools of latents and index pages; either imports the kernels by name where there is CUDA.
_MODULES = (f"{_POOL_HOST}.mla", f"{_POOL_HOST}.dsa")


def supply_transfers() -> None:
    """Give the host pools of this model the copies of `--hicache-io-backend direct`."""
    for module in _MODULES:
        for transfer in _TRANSFERS:
            setattr(importlib.import_module(module), transfer.__name__, transfer)


def check_transfers() -> str | None:
    """None when the host pools copy with our functions."""
    for module in _MODULES:
        for transfer in _TRANSFERS:
            found = getattr(importlib.import_module(module), transfer.__name__, None)
            if found is not transfer:
                return f"{module}.{transfer.__name__} is {found!r}"
    return None


def use_pageable_memory() -> None:
    """Allocate host pools of CPU device pools in ordinary memory."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = allocate_pageable


def check_pageable_memory() -> str | None:
    """None when host pools are allocated in ordinary memory."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    found = ALLOC_MEMORY_FUNCS.get("cpu")
    return None if found is allocate_pageable else f"found {found!r}"


def index_pool_decl(decl: Any, pool: Any, **_: Any) -> Any:
    """AFTER hook of `make_dsa_indexer_pool_decl`: bytes of the index keys that the pool holds.

    SGLang counts a packed key and its scale; a pool of plain keys would come back with the wrong ones.

    Args:
        decl: SGLang's declaration of the index pages' host pool.
        pool: The device pool.
    """
    import msgspec

    page_bytes = next(
        buffer.shape[1] * buffer.dtype.itemsize
        for buffer in pool.index_k_with_scale_buffer
        if buffer.shape[0]
    )
    storage = msgspec.structs.replace(
        decl.storage_info, bytes_per_token_per_layer=page_bytes // pool.page_size
    )
    return msgspec.structs.replace(decl, storage_info=storage)
