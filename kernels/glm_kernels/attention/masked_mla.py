"""MLA of one request over its whole context, under a mask of the selection, in absorbed form."""

import torch

from glm_kernels._checks import FLOAT_DTYPES, INT_DTYPES, Dims
from glm_kernels.attention.masked_mla_torch import masked_mla_torch
from glm_kernels.cache.layout import MLA_DIM


def masked_mla(
    q: torch.Tensor,
    latents: torch.Tensor,
    row_lengths: torch.Tensor,
    softmax_scale: float,
    topk_positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each row to the positions that it sees and selected.

    ::

        visible = arange(context) < row_lengths[t]
        if topk_positions is not None: visible &= isin(arange(context), topk_positions[t])
        scores  = where(visible, q[t] @ latents.T * softmax_scale, -inf)
        out[t]  = softmax(scores) @ latents[:, :512]

    Args:
        q: ``[num_rows, num_heads, 576]``, float. Absorbed query (512), then its rotary part (64).
        latents: ``[context, 576]``, float. The request's latent rows in order of position.
        row_lengths: ``[num_rows]``, int32 or int64. Positions that each row sees.
        softmax_scale: factor of the dot products.
        topk_positions: ``[num_rows, k]``, int32 positions; -1 is none. None selects all: dense.

    Returns:
        out: ``[num_rows, num_heads, 512]``, dtype of ``q``.
        lse: ``[num_rows, num_heads]``, fp32, natural logarithm.

    Raises:
        ValueError: on a shape, dtype or device mismatch.

    Notes:
        A row that sees nothing gives zeros and ``lse`` of ``-inf``. fp32 arithmetic. Equal to
        ``sparse_mla`` over the same selection up to rounding; cheaper while the context is a small
        multiple of k, since nothing is gathered.
    """
    dims = Dims("masked_mla")
    dims.check("q", q, ("num_rows", "num_heads", MLA_DIM), FLOAT_DTYPES)
    dims.check("latents", latents, ("context", MLA_DIM), FLOAT_DTYPES)
    dims.check("row_lengths", row_lengths, ("num_rows",), INT_DTYPES)
    if topk_positions is not None:
        dims.check("topk_positions", topk_positions, ("num_rows", "k"), (torch.int32,))
    return masked_mla_torch(q, latents, row_lengths, softmax_scale, topk_positions)
