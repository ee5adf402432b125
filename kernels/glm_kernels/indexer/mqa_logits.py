"""Index scores over contiguous keys (prefill)."""

import torch

from glm_kernels._checks import FLOAT_DTYPES, FP8_DTYPE, INT_DTYPES, Dims, require
from glm_kernels.cache.layout import INDEX_HEAD_DIM
from glm_kernels.indexer.mqa_logits_torch import mqa_logits_torch


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every query row against the keys of its window.

    ::

        dots   = einsum("nhd,ld->nhl", q, k * k_scale)
        logits = einsum("nh,nhl->nl", weights, relu(dots))
        logits = where((pos >= ks) & (pos < ke), logits, -inf)

    Args:
        q: ``[num_tokens, num_heads, 128]``, float, or e4m3 with its scale folded into ``weights``.
        k: ``[num_keys, 128]``, float, or e4m3 with ``k_scale``.
        weights: ``[num_tokens, num_heads]``, float. Head weights, every constant scale included.
        cu_seqlen_ks: ``[num_tokens]``, int32 or int64. First key of a row's window.
        cu_seqlen_ke: ``[num_tokens]``, int32 or int64. End of the window (not included). An empty
            or inverted window gives a row of ``-inf``.
        k_scale: ``[num_keys]``, fp32, positive. Required with e4m3 keys.

    Returns:
        ``[num_tokens, num_keys]``, fp32; ``-inf`` outside the window.

    Raises:
        ValueError: on a shape, dtype or device mismatch, or e4m3 keys without scales.

    Notes:
        All arithmetic is fp32 on the CPU whatever the dtypes: float32 inputs make the truth mode.
    """
    dims = Dims("mqa_logits")
    dims.check("q", q, ("num_tokens", "num_heads", INDEX_HEAD_DIM), (*FLOAT_DTYPES, FP8_DTYPE))
    dims.check("k", k, ("num_keys", INDEX_HEAD_DIM), (*FLOAT_DTYPES, FP8_DTYPE))
    dims.check("weights", weights, ("num_tokens", "num_heads"), FLOAT_DTYPES)
    dims.check("cu_seqlen_ks", cu_seqlen_ks, ("num_tokens",), INT_DTYPES)
    dims.check("cu_seqlen_ke", cu_seqlen_ke, ("num_tokens",), INT_DTYPES)
    if k_scale is not None:
        dims.check("k_scale", k_scale, ("num_keys",), (torch.float32,))
    require("mqa_logits", k.dtype != FP8_DTYPE or k_scale is not None, "e4m3 keys need k_scale")
    return mqa_logits_torch(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
