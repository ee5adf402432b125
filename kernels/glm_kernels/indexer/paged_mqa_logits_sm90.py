"""Launch of the Hopper scoring kernels. The schedule is formed on the device: no host syncs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from glm_kernels import _arch, _wgmma
from glm_kernels._jit import Kernel, header, load_kernel
from glm_kernels._tensor_map import tensor_map
from glm_kernels.cache.layout import INDEX_HEAD_DIM, INDEX_PAGE_BYTES, PAGE_SIZE

MAX_COLUMNS = 256
MAX_PAIRED_COLUMNS = 128  # of a group where two groups' accumulators are held
MAX_NEXT_N = 8
WARPGROUP = 128  # threads
REGISTERS_BESIDE = 32
STAGED_BYTES = 4 * 48 * 8  # keys that a warpgroup holds back, a row
SHARED_BYTES = 226 << 10  # of a multiprocessor, for all its blocks
LEAST_PAGES_TO_EVEN = 64  # of a block, below which no other blocks follow it
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
        # Copies of sixteen bytes and more, and a map of at least one page.
        and q.data_ptr() % 16 == 0
        and index_cache.data_ptr() % 16 == 0
        and index_cache.shape[0] > 0
        # Its rows may be strided: a table that is repeated for every row of a request serves as it is.
        and block_table.stride(1) == 1
        and block_table.stride(0) >= block_table.shape[1]
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a scoring kernel.

    Attributes:
        groups: 1, or an even number where the tokens' columns pass one instruction.
        tokens: of a group.
        warpgroups: of a block. They share its queries.
        stages: pages of a warpgroup in shared memory.
        min_blocks: blocks of a multiprocessor.
        shared_bytes: of a block.
    """

    groups: int
    tokens: int
    warpgroups: int
    stages: int
    min_blocks: int
    shared_bytes: int


def plan(num_heads: int, next_n: int) -> Plan:
    """Sizes for these heads and tokens a request."""
    groups = (
        1
        if next_n * num_heads <= MAX_COLUMNS
        else 2 * -(-next_n * num_heads // (2 * MAX_PAIRED_COLUMNS))
    )
    tokens = -(-next_n // groups)
    columns = tokens * num_heads
    # Registers allow this many warpgroups: the accumulators of two groups and some more a thread, 512
    # for each of 128 threads. Shared memory then decides between blocks and pages in flight.
    fitting = min(7, 512 // (columns // 2 * min(groups, 2) + REGISTERS_BESIDE))
    # One token is bound by memory and wants pages in flight, more tokens want warpgroups to overlap
    # and to share the queries, which would otherwise take the room of pages.
    warpgroups = 2 if next_n > 1 and fitting % 2 == 0 else 1
    min_blocks = fitting // warpgroups
    fixed = groups * columns * (INDEX_HEAD_DIM + 4) + warpgroups * next_n * STAGED_BYTES
    per_page = INDEX_PAGE_BYTES + 8  # and a barrier

    def stages() -> int:
        room = SHARED_BYTES // min_blocks - 1024 - fixed
        return min(6, room // (warpgroups * per_page))

    while stages() < (4 if next_n == 1 else 3):
        min_blocks -= 1
    return Plan(
        groups,
        tokens,
        warpgroups,
        stages(),
        min_blocks,
        fixed + warpgroups * stages() * per_page,
    )


def source(num_heads: int, next_n: int) -> tuple[tuple[tuple[str, int], ...], str]:
    """Definitions and prelude of ``csrc/paged_mqa_logits.cu`` for these sizes."""
    sizes = plan(num_heads, next_n)
    columns = sizes.tokens * num_heads
    defines = (
        ("NUM_HEADS", num_heads),
        ("NEXT_N", next_n),
        ("GROUPS", sizes.groups),
        ("TOKENS", sizes.tokens),
        ("WARPGROUPS", sizes.warpgroups),
        ("STAGES", sizes.stages),
        ("MIN_BLOCKS", sizes.min_blocks),
    )
    product = _wgmma.wgmma_fp8(columns) + f"#define WGMMA_FP8 wgmma_fp8_n{columns}\n"
    return defines, product + header("order") + header("index_pages") + header("head_sum")


@dataclass(frozen=True, slots=True)
class ScoringKernel:
    """A loaded scoring kernel.

    Attributes:
        kernel: of ``csrc/paged_mqa_logits.cu``.
        threads: of a block.
        resident: blocks that fill the device once.
    """

    kernel: Kernel
    threads: int
    resident: int

    def launch(self, pages: int, args: list[torch.Tensor | int | float | bytes | None]) -> None:
        """Launch with a page for each warpgroup at least, of the ``pages`` that there are at most."""
        self.kernel.launch((self.blocks(pages), 1, 1), self.threads, args, early=True)

    def blocks(self, pages: int) -> int:
        """Blocks for ``pages`` at most: no more than fit the device."""
        return min(self.resident, max(1, -(-pages * WARPGROUP // self.threads)))


@functools.cache
def scoring_kernel(function: str, num_heads: int, next_n: int, device_index: int) -> ScoringKernel:
    """Kernel for these sizes.

    Args:
        function: kernel in ``csrc/paged_mqa_logits.cu``.
        num_heads: index heads.
        next_n: query tokens a request.
        device_index: CUDA device.

    Returns:
        The loaded kernel.
    """
    sizes = plan(num_heads, next_n)
    defines, prelude = source(num_heads, next_n)
    kernel = load_kernel(
        "paged_mqa_logits", function, sizes.shared_bytes, defines, prelude, device_index
    )
    resident = sizes.min_blocks * _arch.sm_count(device_index)
    return ScoringKernel(kernel, WARPGROUP * sizes.warpgroups, resident)


def code_map(index_cache: torch.Tensor) -> bytes:
    """Map of the codes of a cache: one copy takes a page's ``[64, 128]``."""
    return tensor_map(
        index_cache.data_ptr(),
        (INDEX_HEAD_DIM, PAGE_SIZE, index_cache.shape[0]),
        (INDEX_HEAD_DIM, INDEX_PAGE_BYTES),
        (INDEX_HEAD_DIM, PAGE_SIZE, 1),
    )


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
    kernel = scoring_kernel("paged_mqa_logits_kernel", num_heads, next_n, q.device.index or 0)
    pages = batch_size * block_table.shape[1]
    even_blocks = kernel.blocks(pages)
    # Bound by memory, blocks end at different times: as many again share the last pages.
    later_blocks = even_blocks if next_n == 1 and pages >= LEAST_PAGES_TO_EVEN * even_blocks else 0
    kernel.kernel.launch(
        (even_blocks + later_blocks, 1, 1),
        kernel.threads,
        [
            *(code_map(index_cache), q, index_cache, weights, cache_seqlens, block_table, out),
            *(batch_size, block_table.stride(0), block_table.shape[1], even_blocks, out.stride(0)),
        ],
        early=True,
    )
