"""Sparse MLA for verify: the draft tokens of a request share one gather."""

from __future__ import annotations

import torch

from glm_kernels import _arch
from glm_kernels._checks import FLOAT_DTYPES, Dims, require
from glm_kernels.attention.sparse_mla_sm90 import MAX_ROWS, accepts, sparse_mla_sm90
from glm_kernels.attention.sparse_mla_torch import sparse_mla_torch
from glm_kernels.cache.layout import MLA_DIM
from glm_kernels.cache.store_mla_kv import check_kv_cache


def sparse_mla_verify(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    lists: torch.Tensor,
    members: torch.Tensor,
    counts: torch.Tensor,
    softmax_scale: float,
    expected_union: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the tokens of each request to their own entries of the request's list.

    ::

        chosen(t) = lists[b, :counts[b]][members[b] >> t & 1]
        out[b * next_n + t], lse = sparse_mla(q[b * next_n + t], kv_cache, chosen(t), softmax_scale)

    Args:
        q: ``[batch_size * next_n, num_heads, 576]``, float. Absorbed query, then its rotary part.
        kv_cache: ``[num_slots, 1, 576]`` float or ``[num_slots, 1, 656]`` uint8.
        lists: ``[batch_size, list_length]``, int32, of ``union_slots``.
        members: ``[batch_size, list_length]``, uint8, of ``union_slots``.
        counts: ``[batch_size]``, int32, of ``union_slots``.
        softmax_scale: factor of the dot products.
        expected_union: entries that a list is likely to use; chooses the number of splits only.

    Returns:
        out: ``[batch_size * next_n, num_heads, 512]``, dtype of ``q``.
        lse: ``[batch_size * next_n, num_heads]``, fp32, natural logarithm.

    Raises:
        ValueError: on a shape, dtype or device mismatch.

    Notes:
        One gather serves ``64 // num_heads`` tokens; with more heads than that the tokens of a
        request attend one by one over the list. A token that selected nothing gives zeros and -inf.
    """
    op = "sparse_mla_verify"
    dims = Dims(op)
    dims.check("q", q, ("num_tokens", "num_heads", MLA_DIM), FLOAT_DTYPES)
    check_kv_cache(dims, kv_cache)
    dims.check("lists", lists, ("batch_size", "list_length"), (torch.int32,))
    dims.check("members", members, ("batch_size", "list_length"), (torch.uint8,))
    dims.check("counts", counts, ("batch_size",), (torch.int32,))
    num_tokens, batch_size = dims["num_tokens"], dims["batch_size"]
    even = batch_size > 0 and num_tokens % batch_size == 0
    require(op, even, f"{num_tokens} tokens do not divide over {batch_size} requests")
    next_n = num_tokens // batch_size
    if (
        _arch.use_device_code("sparse_mla", q)
        and accepts(q, kv_cache, lists)
        and next_n * dims["num_heads"] <= MAX_ROWS
    ):
        return sparse_mla_sm90(
            q,
            kv_cache,
            lists,
            softmax_scale,
            counts=counts,
            members=members.contiguous(),
            tokens_per_list=next_n,
            expected_length=expected_union,
        )
    position = torch.arange(dims["list_length"], device=q.device)
    token = torch.arange(next_n, device=q.device)[:, None]
    selected = (members[:, None] >> token & 1).bool() & (position < counts[:, None, None])
    slots = torch.where(selected, lists[:, None], -1).flatten(0, 1)  # [num_tokens, list_length]
    if _arch.use_device_code("sparse_mla", q) and accepts(q, kv_cache, slots):
        return sparse_mla_sm90(q, kv_cache, slots, softmax_scale)
    return sparse_mla_torch(q, kv_cache, slots, softmax_scale)
