"""Score and select over contiguous keys (prefill) without the whole logits matrix."""

import torch

from glm_kernels._checks import require
from glm_kernels.indexer.mqa_logits import mqa_logits
from glm_kernels.indexer.topk_indices import topk_indices

LOGITS_BYTES = 256 << 20


def mqa_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    k_scale: torch.Tensor | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> torch.Tensor:
    """Select the ``topk`` best keys of each row's window.

    ::

        topk_indices(mqa_logits(q, k, weights, ks, ke, k_scale), topk, ks, ke)

    Args:
        q: ``[num_tokens, num_heads, 128]``, float, or e4m3 with its scale folded into ``weights``.
        k: ``[num_keys, 128]``, float, or e4m3 with ``k_scale``.
        weights: ``[num_tokens, num_heads]``, float.
        cu_seqlen_ks: ``[num_tokens]``, int32 or int64, start of each window.
        cu_seqlen_ke: ``[num_tokens]``, int32 or int64, end of each window.
        topk: entries a row.
        k_scale: ``[num_keys]``, fp32. Required with e4m3 keys.
        logits_bytes: budget of the fp32 logits held at a time; one row is always allowed.

    Returns:
        ``[num_tokens, topk]``, int32, relative to the window's start, -1 at the tail.

    Raises:
        ValueError: as ``mqa_logits`` and ``topk_indices``.
    """
    require(
        "mqa_topk", q.dim() == 3, f"q is {list(q.shape)}, expected [num_tokens, num_heads, 128]"
    )
    step = max(1, logits_bytes // (4 * max(k.shape[0], 1)))
    out = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        window = cu_seqlen_ks[part], cu_seqlen_ke[part]
        logits = mqa_logits(q[part], k, weights[part], *window, k_scale)
        out[part] = topk_indices(logits, topk, *window)
    return out
