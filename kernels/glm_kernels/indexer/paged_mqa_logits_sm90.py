"""Launch of the Hopper scoring kernels. The schedule is formed on the device: no host syncs."""

from __future__ import annotations

import functools

import torch

from glm_kernels import _arch, _wgmma
from glm_kernels._jit import Kernel, header, load_kernel
from glm_kernels.cache.layout import INDEX_HEAD_DIM, INDEX_PAGE_BYTES

MAX_COLUMNS = 256
MAX_PAIRED_COLUMNS = 128  # of a group where two groups' accumulators are held
MAX_NEXT_N = 8
REGISTERS_BESIDE = 32
STAGED_BYTES = 4 * 24 * 8  # keys that four warps hold back, a row
SHARED_BYTES = 226 << 10  # of a multiprocessor, for all its blocks
NUM_HEADS = (16, 32, 64)


def accepts(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
) -> bool:
    """Whether these (already checked) arguments fit the kernels; others take the torch form."""
    return (
        q.dtype == torch.float8_e4m3fn
        and index_cache.dtype == torch.uint8
        and weights.dtype == torch.float32
        and cache_seqlens.dtype == torch.int32
        and block_table.dtype == torch.int32
        and q.shape[2] in NUM_HEADS
        and 1 <= q.shape[1] <= MAX_NEXT_N
        and all(t.is_contiguous() for t in (q, index_cache, weights, cache_seqlens))
        # Its rows may be strided: a table that is repeated for every row of a request serves as it is.
        and block_table.stride(1) == 1
        and block_table.stride(0) >= block_table.shape[1]
    )


def _stages(blocks: int, shared_fixed: int) -> int:
    return min(6, (SHARED_BYTES // blocks - 1024 - shared_fixed) // INDEX_PAGE_BYTES)


@functools.cache
def scoring_kernel(
    function: str, num_heads: int, next_n: int, device_index: int
) -> tuple[Kernel, int]:
    """Kernel for these sizes and its number of blocks.

    Args:
        function: kernel in ``csrc/paged_mqa_logits.cu``.
        num_heads: index heads.
        next_n: query tokens a request.
        device_index: CUDA device.

    Returns:
        The kernel and the blocks that fill the device once.
    """
    groups = (
        1
        if next_n * num_heads <= MAX_COLUMNS
        else 2 * -(-next_n * num_heads // (2 * MAX_PAIRED_COLUMNS))
    )
    tokens = -(-next_n // groups)
    columns = tokens * num_heads
    shared_fixed = groups * columns * (INDEX_HEAD_DIM + 4) + next_n * STAGED_BYTES
    # Registers allow this many blocks: the accumulators of two groups and some more a thread, 512
    # for each of 128 threads. Shared memory then decides between blocks and pages in flight.
    min_blocks = min(7, 512 // (columns // 2 * min(groups, 2) + REGISTERS_BESIDE))
    # One token is bound by memory and wants pages in flight, more tokens want blocks to overlap.
    least = 4 if next_n == 1 else 3
    while (stages := _stages(min_blocks, shared_fixed)) < least:
        min_blocks -= 1
    defines = (
        ("NUM_HEADS", num_heads),
        ("NEXT_N", next_n),
        ("GROUPS", groups),
        ("TOKENS", tokens),
        ("STAGES", stages),
        ("MIN_BLOCKS", min_blocks),
    )
    prelude = (
        _wgmma.wgmma_fp8(columns) + f"#define WGMMA_FP8 wgmma_fp8_n{columns}\n" + header("order")
    )
    shared_bytes = shared_fixed + stages * INDEX_PAGE_BYTES
    kernel = load_kernel("paged_mqa_logits", function, shared_bytes, defines, prelude, device_index)
    return kernel, min_blocks * _arch.sm_count(device_index)


def paged_mqa_logits_sm90(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the scores of every visible position; the rest of ``out`` is left as it is.

    Args:
        q: ``[batch_size, next_n, num_heads, 128]``, e4m3.
        index_cache: ``[num_pages, 8448]``, uint8.
        weights: ``[batch_size, next_n, num_heads]``, fp32.
        cache_seqlens: ``[batch_size]``, int32.
        block_table: ``[batch_size, max_num_blocks]``, int32; rows may be strided.
        out: ``[batch_size * next_n, max_context]``, fp32, written in place.
    """
    batch_size, next_n, num_heads, _ = q.shape
    index = q.device.index or 0
    kernel, blocks = scoring_kernel("paged_mqa_logits_kernel", num_heads, next_n, index)
    kernel.launch(
        (blocks, 1, 1),
        128,
        [
            *(q, index_cache, weights, cache_seqlens, block_table, out),
            *(batch_size, block_table.stride(0), out.stride(0)),
        ],
        early=True,
    )
