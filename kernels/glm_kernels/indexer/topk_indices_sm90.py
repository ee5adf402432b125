"""Launch of the Hopper selection kernels over a matrix of logits."""

from __future__ import annotations

import functools

import torch

from glm_kernels import _arch
from glm_kernels._jit import Kernel, header, load_kernel

# Candidates kept for a row. Above the largest k by enough that a sampled threshold seldom misses.
CAPACITY = 8192
MAX_TOPK = 4096
SAMPLE_STEP = 64
THREADS = 512
BUCKET_BYTES = 4 * (8192 + THREADS)  # of block_sort.cuh
# Columns of a matrix: the keys of a whole prefill batch. A window's threshold is sampled from its first
# million columns; the count of what passes decides whether it holds.
MAX_WIDTH = 1 << 24


def accepts(
    logits: torch.Tensor,
    k: int,
    cu_seqlen_ks: torch.Tensor | None,
    cu_seqlen_ke: torch.Tensor | None,
    block_table: torch.Tensor | None = None,
    row_to_batch: torch.Tensor | None = None,
) -> bool:
    """Whether these (already checked) arguments fit the kernels; others take the torch form."""
    integers = (cu_seqlen_ks, cu_seqlen_ke, block_table, row_to_batch)
    return (
        logits.dtype == torch.float32
        and logits.stride(1) == 1
        and 0 < k <= MAX_TOPK
        and 0 < logits.shape[1] <= MAX_WIDTH
        and logits.shape[0] > 0
        and all(t is None or (t.dtype == torch.int32 and t.is_contiguous()) for t in integers)
    )


@functools.cache
def topk_kernel(function: str, device_index: int) -> Kernel:
    """Kernel of ``csrc/topk_indices.cu``."""
    shared_bytes = 8 * CAPACITY + BUCKET_BYTES if function == "topk_sort_kernel" else 0
    defines = (("CAPACITY", CAPACITY),)
    prelude = header("order") + header("block_sort")
    return load_kernel("topk_indices", function, shared_bytes, defines, prelude, device_index)


def topk_indices_sm90(
    logits: torch.Tensor,
    k: int,
    cu_seqlen_ks: torch.Tensor | None,
    cu_seqlen_ke: torch.Tensor | None,
    block_table: torch.Tensor | None = None,
    page_size: int = 1,
    row_to_batch: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    next_n: int = 1,
) -> torch.Tensor:
    """Device form of ``topk_indices``.

    Args:
        logits: ``[num_tokens, width]``, fp32, unit stride along the width.
        k: entries a row, at most ``MAX_TOPK``.
        cu_seqlen_ks: ``[num_tokens]``, int32, or None.
        cu_seqlen_ke: ``[num_tokens]``, int32, or None.
        block_table: ``[batch_size, max_num_blocks]``, int32; slots are written when it is given.
        page_size: positions a page of ``block_table``.
        row_to_batch: ``[num_tokens]``, int32, or None for an even spread.
        cache_seqlens: ``[num_tokens / next_n]``, int32. In place of the windows: row t of a request
            sees its first ``cache_seqlens - next_n + t + 1`` columns.
        next_n: rows a request with ``cache_seqlens``.

    Returns:
        ``[num_tokens, k]``, int32.
    """
    num_tokens, width = logits.shape
    device, index = logits.device, logits.device.index or 0
    thresholds = torch.empty(num_tokens, device=device)
    counts = torch.empty(num_tokens, dtype=torch.int32, device=device)
    candidates = torch.empty(num_tokens, CAPACITY, dtype=torch.int64, device=device)
    out = torch.empty(num_tokens, k, dtype=torch.int32, device=device)
    window = (cu_seqlen_ks, cu_seqlen_ke, cache_seqlens, width, next_n, logits.stride(0))
    topk_kernel("topk_threshold_kernel", index).launch(
        (num_tokens, 1, 1),
        THREADS,
        [logits, thresholds, counts, *window, SAMPLE_STEP, 0, k],
        early=True,
    )
    pieces = max(1, min(width // 2048, 16 * _arch.sm_count(index) // num_tokens))
    topk_kernel("topk_filter_kernel", index).launch(
        (pieces, num_tokens, 1), 256, [logits, thresholds, counts, candidates, *window], early=True
    )
    batch_size, table_stride = (
        (block_table.shape[0], block_table.stride(0)) if block_table is not None else (1, 0)
    )
    topk_kernel("topk_sort_kernel", index).launch(
        (num_tokens, 1, 1),
        THREADS,
        [
            *(logits, thresholds, counts, candidates, *window),
            *(block_table, row_to_batch, max(1, num_tokens // batch_size), table_stride),
            *(page_size, out, k),
        ],
        early=True,
    )
    return out
