"""Score and select over the index cache.

Where the logits of the whole batch are small, they are written and selected from: with several
tokens a request that is the quicker way. Otherwise one pass over the cache does both without that
matrix. A sample of the pages is scored first; its scores give each row a threshold that lets
somewhat more than k positions pass. The full pass keeps those only. Rows whose count shows that the
threshold was too high or too low (tied scores, sorted contexts) are selected exactly by a repair
kernel beside the sort, which scores their request once a byte of the selection key. Workspace: 64
KB of candidates a row and 1/64 of the logits.
"""

from __future__ import annotations

import torch

from glm_kernels.cache.layout import PAGE_SIZE
from glm_kernels.indexer.paged_mqa_logits_sm90 import (
    code_map,
    paged_mqa_logits_sm90,
    scoring_kernel,
)
from glm_kernels.indexer.topk_indices_sm90 import (
    CAPACITY,
    SAMPLE_STEP,
    THREADS,
    topk_indices_sm90,
    topk_kernel,
)

# Largest matrix of logits that is written; more rows or longer contexts take the single pass.
MATRIX_BYTES = 64 << 20
# The threshold kernel holds this many samples of a row.
MAX_SAMPLES = 16384


def sample_step(max_num_blocks: int) -> int:
    """Pages of which one is sampled, for a block table of this width."""
    return max(SAMPLE_STEP, -(-max_num_blocks * 64 // MAX_SAMPLES))


def workspace_bytes(rows: int, max_num_blocks: int) -> int:
    """Bytes of device memory that the single pass allocates beside its result.

    Args:
        rows: ``batch_size * next_n``.
        max_num_blocks: width of the block table.

    Returns:
        Bytes.
    """
    sample_pages = -(-max_num_blocks // sample_step(max_num_blocks))
    return rows * (8 * CAPACITY + 256 * sample_pages + 8)


def paged_mqa_topk_sm90(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    return_slots: bool = False,
) -> torch.Tensor:
    """Device form of ``paged_mqa_topk``; arguments as there, already checked and accepted."""
    rows, width = q.shape[0] * q.shape[1], block_table.shape[1] * PAGE_SIZE
    inputs = (q, index_cache, weights, cache_seqlens, block_table)
    if q.shape[1] == 1 or 4 * rows * width > MATRIX_BYTES:
        return select_in_one_pass(*inputs, topk, return_slots)
    logits = torch.empty(rows, width, device=q.device)
    paged_mqa_logits_sm90(*inputs, logits)
    return topk_indices_sm90(
        logits,
        topk,
        None,
        None,
        block_table=block_table if return_slots else None,
        page_size=PAGE_SIZE,
        cache_seqlens=cache_seqlens,
        next_n=q.shape[1],
    )


def select_in_one_pass(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    return_slots: bool,
) -> torch.Tensor:
    """Score and select without a matrix of scores; arguments as in ``paged_mqa_topk``."""
    batch_size, next_n, num_heads, _ = q.shape
    max_num_blocks, table_stride = block_table.shape[1], block_table.stride(0)
    device, index = q.device, q.device.index or 0
    rows = batch_size * next_n
    thresholds = torch.empty(rows, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    candidates = torch.empty(rows, CAPACITY, dtype=torch.int64, device=device)
    out = torch.empty(rows, topk, dtype=torch.int32, device=device)
    inputs = (code_map(index_cache), q, index_cache, weights, cache_seqlens, block_table)

    step = sample_step(max_num_blocks)
    sample_width = -(-max_num_blocks // step) * 64
    sample = torch.empty(rows, sample_width, device=device)
    # Contexts within the capacity keep every score: they need no threshold.
    if max_num_blocks * 64 > CAPACITY:
        scoring_kernel("paged_mqa_sample_kernel", num_heads, next_n, index).launch(
            batch_size * sample_width // PAGE_SIZE,
            [*inputs, sample, batch_size, table_stride, sample_width, step],
        )
    window = (None, None, cache_seqlens, sample_width, next_n, sample_width)
    topk_kernel("topk_threshold_kernel", index).launch(
        (rows, 1, 1), THREADS, [sample, thresholds, counts, *window, step, 1, topk], True
    )
    kept = (thresholds, counts, candidates)
    sizes = (batch_size, table_stride, max_num_blocks, index_cache.shape[0], CAPACITY)
    scoring_kernel("paged_mqa_filter_kernel", num_heads, next_n, index).launch(
        batch_size * max_num_blocks, [*inputs, *kept, *sizes]
    )
    table = block_table if return_slots else None
    topk_kernel("topk_sort_kernel", index).launch(
        (rows, 1, 1),
        THREADS,
        [None, *kept, *window, table, None, next_n, table_stride, PAGE_SIZE, out, topk],
        early=True,
    )
    repair = scoring_kernel("paged_mqa_repair_kernel", num_heads, next_n, index)
    rest = (table_stride, CAPACITY, out, int(return_slots), topk)
    repair.kernel.launch((batch_size, 1, 1), repair.threads, [*inputs, *kept, *rest], early=True)
    return out
