"""Exact, deterministic selection of the best positions."""

import torch

from glm_kernels import _arch
from glm_kernels._checks import FLOAT_DTYPES, INT_DTYPES, Dims, require
from glm_kernels.indexer.topk_indices_sm90 import accepts, topk_indices_sm90
from glm_kernels.indexer.topk_indices_torch import topk_indices_torch


def positions_to_slots(
    topk_positions: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    row_to_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map request-local positions to physical slots.

    ::

        slot = block_table[b, pos // page_size] * page_size + pos % page_size

    Args:
        topk_positions: ``[num_tokens, k]``, int32; -1 stays -1.
        block_table: ``[batch_size, max_num_blocks]``, int32 or int64. ``page_size`` 1 makes it a
            table of slots.
        page_size: positions a page.
        row_to_batch: ``[num_tokens]``, int32 or int64, request of each row. None: the rows are
            divided evenly over the requests, in order.

    Returns:
        ``[num_tokens, k]``, int32 slots.

    Raises:
        ValueError: on a shape, dtype or device mismatch.
    """
    op = "positions_to_slots"
    dims = Dims(op)
    dims.check("topk_positions", topk_positions, ("num_tokens", "k"), (torch.int32,))
    dims.check("block_table", block_table, ("batch_size", "max_num_blocks"), INT_DTYPES)
    num_tokens, batch_size = dims["num_tokens"], dims["batch_size"]
    if row_to_batch is None:
        even = num_tokens % batch_size == 0 if batch_size else num_tokens == 0
        require(
            op,
            even,
            f"{num_tokens} rows do not divide over {batch_size} requests; pass row_to_batch",
        )
        per_request = num_tokens // batch_size if batch_size else 1
        row_to_batch = torch.arange(num_tokens, device=topk_positions.device) // max(per_request, 1)
    else:
        dims.check("row_to_batch", row_to_batch, ("num_tokens",), INT_DTYPES)
    position = topk_positions.clamp_min(0).long()
    page = block_table[row_to_batch.long()[:, None], position // page_size].long()
    slots = page * page_size + position % page_size
    return slots.masked_fill(topk_positions < 0, -1).int()


def topk_indices(
    logits: torch.Tensor,
    k: int,
    cu_seqlen_ks: torch.Tensor | None = None,
    cu_seqlen_ke: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_size: int = 64,
    row_to_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the k best positions of each row's window.

    ::

        scores  = where(isnan(logits) | outside(ks, ke), -inf, logits)
        order   = sort(scores, descending=True, stable=True).indices[:, :k]
        indices = where(scores[order] == -inf, -1, order - ks)

    Args:
        logits: ``[num_tokens, width]``, float.
        k: entries a row, any size; more than ``width`` pads.
        cu_seqlen_ks: ``[num_tokens]``, int32 or int64, at least 0. Start of each window; None is 0.
        cu_seqlen_ke: ``[num_tokens]``, int32 or int64. End of each window (not included); None is
            ``width``. Empty and inverted windows give a row of -1.
        block_table: ``[batch_size, max_num_blocks]``. With it the result holds physical slots
            (``positions_to_slots``), else positions relative to the window's start.
        page_size: positions a page of ``block_table``.
        row_to_batch: ``[num_tokens]``, row of ``block_table`` for each row; None spreads evenly.

    Returns:
        ``[num_tokens, k]``, int32. Score descending, position ascending among equal scores; -1
        padding at the tail only.

    Raises:
        ValueError: on a shape, dtype or device mismatch, or a negative ``k``.

    Notes:
        NaN counts as ``-inf``; ``-inf`` is never selected, ``+inf`` is. -0.0 equals +0.0. The
        result is the same on every run and device.
    """
    dims = Dims("topk_indices")
    dims.check("logits", logits, ("num_tokens", "width"), FLOAT_DTYPES)
    require("topk_indices", k >= 0, f"k is {k}, expected at least 0")
    for name, bound in (("cu_seqlen_ks", cu_seqlen_ks), ("cu_seqlen_ke", cu_seqlen_ke)):
        if bound is not None:
            dims.check(name, bound, ("num_tokens",), INT_DTYPES)
    window = (cu_seqlen_ks, cu_seqlen_ke)
    if _arch.use_device_code("topk_indices", logits) and accepts(
        logits, k, *window, block_table, row_to_batch
    ):
        return topk_indices_sm90(logits, k, *window, block_table, page_size, row_to_batch)
    positions = topk_indices_torch(logits, k, cu_seqlen_ks, cu_seqlen_ke)
    if block_table is None:
        return positions
    return positions_to_slots(positions, block_table, page_size, row_to_batch)
