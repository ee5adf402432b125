"""Launch of the Hopper sparse MLA kernels and of the combination of their splits."""

from __future__ import annotations

import functools
import math

import torch

from glm_kernels import _arch, _wgmma
from glm_kernels._jit import Kernel, load_kernel
from glm_kernels.attention.plan_splits import TILE, plan_splits
from glm_kernels.cache.layout import KV_LORA_RANK, MLA_DIM, MLA_ROW_BYTES

# Rows of a tile: heads of one token, or of the tokens that share a list.
MAX_ROWS = 64
_QUERY_BYTES = 64 * 2 * MLA_DIM
_SHARED_BYTES = 3 * _QUERY_BYTES  # queries, two tiles of keys
# Queries, probabilities of two tiles, three tiles of packed rows.
_PACKED_SHARED_BYTES = _QUERY_BYTES + 2 * 64 * 64 * 2 + 3 * 64 * MLA_ROW_BYTES


def accepts(q: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether these (already checked) arguments fit the kernel; others take the torch form."""
    return (
        q.dtype == torch.bfloat16
        and kv_cache.dtype in (torch.uint8, torch.bfloat16)
        and 1 <= q.shape[1] <= MAX_ROWS
        and slots.shape[1] > 0
        and all(t.is_contiguous() for t in (q, kv_cache, slots))
    )


@functools.cache
def _bf16_kernel(device_index: int) -> Kernel:
    prelude = _wgmma.wgmma_half(64, "bf16", b_transposed=False)
    prelude += _wgmma.wgmma_half(256, "bf16", b_transposed=True)
    return load_kernel("sparse_mla", "sparse_mla_kernel", _SHARED_BYTES, (), prelude, device_index)


def packed_prelude(rows: int) -> str:
    """Products that the packed kernel uses, for so many query rows."""
    return "".join(
        _wgmma.wgmma_half_registers(rows, dtype, transposed)
        + f"#define {name} wgmma_rs_{dtype}_n{rows}{'_t' if transposed else ''}\n"
        for name, dtype, transposed in (
            ("WGMMA_SCORES", "f16", False),
            ("WGMMA_ROTARY", "bf16", False),
            ("WGMMA_VALUES", "f16", True),
        )
    )


@functools.cache
def _packed_kernel(rows: int, members: bool, device_index: int) -> Kernel:
    return load_kernel(
        "sparse_mla_packed",
        "sparse_mla_packed_kernel",
        _PACKED_SHARED_BYTES,
        (("ROWS", rows), ("MEMBERS", int(members))),
        packed_prelude(rows),
        device_index,
    )


@functools.cache
def _combine_kernels(half: bool, device_index: int) -> dict[int, Kernel]:
    """By parts in flight; loaded together, since a graph's capture may need either."""
    return {
        at_once: load_kernel(
            "combine_splits",
            "combine_splits_kernel",
            0,
            (("HALF", int(half)), ("AT_ONCE", at_once)),
            device_index=device_index,
        )
        for at_once in (4, 16)
    }


def sparse_mla_sm90(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    lists: torch.Tensor,
    softmax_scale: float,
    counts: torch.Tensor | None = None,
    members: torch.Tensor | None = None,
    tokens_per_list: int = 1,
    expected_length: int | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each token to its list, or to its members of a shared list.

    Args:
        q: ``[num_tokens, num_heads, 576]``, bf16; ``tokens_per_list * num_heads`` at most 64.
        kv_cache: ``[num_slots, 1, 656]`` uint8 or ``[num_slots, 1, 576]`` bf16.
        lists: ``[num_tokens / tokens_per_list, list_length]``, int32 slots, -1 for none.
        softmax_scale: factor of the dot products.
        counts: ``[num_lists]``, int32, entries in use; None for all.
        members: ``[num_lists, list_length]``, uint8; bit i says that token i of the list's tokens
            selected the entry. None: all did.
        tokens_per_list: consecutive tokens that share a list.
        expected_length: entries that a list is likely to use, for the choice of splits.
        num_splits: pieces a list; None chooses.

    Returns:
        out: ``[num_tokens, num_heads, 512]``, bf16.
        lse: ``[num_tokens, num_heads]``, fp32, natural logarithm.
    """
    num_tokens, num_heads, _ = q.shape
    device, index = q.device, q.device.index or 0
    packed = kv_cache.dtype == torch.uint8
    rows = num_tokens * num_heads
    num_lists, list_length = lists.shape
    if num_splits is None:
        # Half of a pair of packed tiles may be absent.
        length, tile = expected_length or list_length, 64 if packed else TILE
        num_splits = plan_splits(num_lists, length, _arch.sm_count(index), tile)
    out = torch.empty(num_tokens, num_heads, KV_LORA_RANK, dtype=torch.bfloat16, device=device)
    lse = torch.empty(num_tokens, num_heads, device=device)
    parts, part_lse = out, lse
    if num_splits > 1:
        part_type = torch.float16 if packed else torch.bfloat16
        parts = torch.empty(num_splits, rows, KV_LORA_RANK, dtype=part_type, device=device)
        part_lse = torch.empty(num_splits, rows, device=device)
    scale_log2 = softmax_scale * math.log2(math.e)
    tensors = [q, kv_cache, lists, counts, members, parts, part_lse]
    sizes = [tokens_per_list * num_heads, num_heads, list_length, rows]
    if packed:
        padded = -(-tokens_per_list * num_heads // 16) * 16
        _packed_kernel(padded, members is not None, index).launch(
            (min(num_lists * num_splits, _arch.sm_count(index)), 1, 1),
            384,
            [*tensors, *sizes, num_splits, scale_log2],
            early=True,
        )
    else:
        _bf16_kernel(index).launch(
            (min(num_lists * num_splits, _arch.sm_count(index)), 1, 1),
            384,
            [*tensors, *sizes, num_splits, scale_log2],
            early=True,
        )
    if num_splits > 1:
        _combine_kernels(packed, index)[4 if num_splits <= 4 else 16].launch(
            (-(-rows // 4), 1, 1), 256, [parts, part_lse, out, lse, rows, num_splits], early=True
        )
    return out, lse
