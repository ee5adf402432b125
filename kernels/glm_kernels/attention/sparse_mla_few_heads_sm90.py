"""Launch of the Hopper sparse MLA kernel for at most eight heads a token over packed rows."""

from __future__ import annotations

import functools
import math

import torch

from glm_kernels import _arch
from glm_kernels._jit import Kernel, load_kernel
from glm_kernels.attention.sparse_mla_sm90 import accepts as accepts_any_heads
from glm_kernels.cache.layout import KV_LORA_RANK, MLA_ROW_BYTES

MAX_HEADS = 8
# With fewer tokens the kernel for up to 64 query rows is quicker (measured at 64, the reverse at 96).
MIN_TOKENS = 65
# Blocks that share a token's list; a cluster of them joins its parts without global memory.
CLUSTERS = (1, 2, 4, 8)
_TEAMS = 4  # pairs of warps
_TILE = 16  # rows that a pair gathers at once
_STAGES = 2
_SHARED_BYTES = _TEAMS * _STAGES * _TILE * MLA_ROW_BYTES + 18 * 512  # rings, queries
_BLOCKS_PER_SM = 2
# Cost of starting and ending a block, in tiles of a pair (fitted to times from 1 to 192 tokens).
_BLOCK_OVERHEAD_TILES = 5


def accepts(q: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether these (already checked) arguments fit the kernel."""
    return (
        accepts_any_heads(q, kv_cache, slots)
        and kv_cache.dtype == torch.uint8
        and q.shape[1] <= MAX_HEADS
    )


def plan_cluster(num_tokens: int, list_length: int, num_sms: int) -> int:
    """Blocks a token for the least time of the slowest multiprocessor.

    Args:
        num_tokens: tokens.
        list_length: entries a list.
        num_sms: multiprocessors.

    Returns:
        One of ``CLUSTERS``.
    """
    tiles = -(-list_length // _TILE)

    def cost(cluster: int) -> float:
        blocks = num_tokens * cluster
        waves = -(-blocks // (_BLOCKS_PER_SM * num_sms))
        # Two blocks on a multiprocessor take this much longer than one.
        shared = 1.6 if blocks > num_sms else 1.0
        return waves * shared * (-(-tiles // (_TEAMS * cluster)) + _BLOCK_OVERHEAD_TILES)

    return min(CLUSTERS, key=cost)


@functools.cache
def _kernel(cluster: int, device_index: int) -> Kernel:
    defines = (("CLUSTER", cluster), ("STAGES", _STAGES))
    return load_kernel(
        "sparse_mla_few_heads",
        "sparse_mla_few_heads_kernel",
        _SHARED_BYTES,
        defines,
        device_index=device_index,
    )


def sparse_mla_few_heads_sm90(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
    cluster: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each token to its list.

    Args:
        q: ``[num_tokens, num_heads, 576]``, bf16, at most eight heads.
        kv_cache: ``[num_slots, 1, 656]``, uint8.
        slots: ``[num_tokens, list_length]``, int32, -1 for none.
        softmax_scale: factor of the dot products.
        cluster: blocks a token, of ``CLUSTERS``; None chooses.

    Returns:
        out: ``[num_tokens, num_heads, 512]``, bf16.
        lse: ``[num_tokens, num_heads]``, fp32, natural logarithm.
    """
    num_tokens, num_heads, _ = q.shape
    device, index = q.device, q.device.index or 0
    list_length = slots.shape[1]
    if cluster is None:
        cluster = plan_cluster(num_tokens, list_length, _arch.sm_count(index))
    out = torch.empty(num_tokens, num_heads, KV_LORA_RANK, dtype=torch.bfloat16, device=device)
    lse = torch.empty(num_tokens, num_heads, device=device)
    # A grid's second dimension ends at 65,535.
    for first in range(0, num_tokens, 65_535):
        part = slice(first, first + 65_535)
        _kernel(cluster, index).launch(
            (cluster, min(65_535, num_tokens - first), 1),
            64 * _TEAMS,
            [
                *(q[part], kv_cache, slots[part], out[part], lse[part]),
                *(num_heads, list_length, softmax_scale * math.log2(math.e)),
            ],
            early=True,
        )
    return out, lse
