"""MLA over selected cache rows, in absorbed form."""

import torch

from glm_kernels import _arch
from glm_kernels._checks import FLOAT_DTYPES, Dims
from glm_kernels.attention import sparse_mla_few_heads_sm90 as few_heads
from glm_kernels.attention.sparse_mla_sm90 import accepts, sparse_mla_sm90
from glm_kernels.attention.sparse_mla_torch import sparse_mla_torch
from glm_kernels.cache.layout import MLA_DIM
from glm_kernels.cache.store_mla_kv import check_kv_cache


def sparse_mla(
    q: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each token to the cache rows that it selected.

    ::

        rows   = kv_cache[slots[t]]                       # valid slots only, [k', 576]
        scores = q[t] @ rows.T * softmax_scale            # [num_heads, k']
        lse[t] = logsumexp(scores)
        out[t] = softmax(scores) @ rows[:, :512]

    Args:
        q: ``[num_tokens, num_heads, 576]``, float. Absorbed query (512), then its rotary part (64).
        kv_cache: ``[num_slots, 1, 576]`` float, or ``[num_slots, 1, 656]`` uint8 packed rows.
        slots: ``[num_tokens, k]``, int32. Physical slots; -1 is none and may stand anywhere. A slot
            listed twice counts twice.
        softmax_scale: factor of the dot products.

    Returns:
        out: ``[num_tokens, num_heads, 512]``, dtype of ``q``.
        lse: ``[num_tokens, num_heads]``, fp32, natural logarithm.

    Raises:
        ValueError: on a shape, dtype or device mismatch.

    Notes:
        A token without valid slots gives zeros and ``lse`` of ``-inf``. Rows that no slot names are
        never read into the result, so they may hold anything. The torch form computes in fp32. The
        Hopper form (bf16 queries, at most 64 heads) multiplies packed rows as fp16 (codes, scales,
        their products, queries and probabilities rounded to 11 bits, magnitudes saturating at
        65504) and bf16 rows as bf16, accumulates in fp32, and splits long lists over blocks whose
        parts are kept in 16 bits. With at most eight heads and more than 64 tokens, packed rows stay
        exact: their scales multiply scores and probabilities, and the parts are kept in fp32.
    """
    dims = Dims("sparse_mla")
    dims.check("q", q, ("num_tokens", "num_heads", MLA_DIM), FLOAT_DTYPES)
    check_kv_cache(dims, kv_cache)
    dims.check("slots", slots, ("num_tokens", "k"), (torch.int32,))
    if _arch.use_device_code("sparse_mla", q) and dims["num_tokens"] > 0:
        many_tokens = dims["num_tokens"] >= few_heads.MIN_TOKENS
        if many_tokens and few_heads.accepts(q, kv_cache, slots):
            return few_heads.sparse_mla_few_heads_sm90(q, kv_cache, slots, softmax_scale)
        if accepts(q, kv_cache, slots):
            return sparse_mla_sm90(q, kv_cache, slots, softmax_scale)
    return sparse_mla_torch(q, kv_cache, slots, softmax_scale)
