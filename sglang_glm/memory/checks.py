"""What the pool refuses, in one sentence each: sizes, dtypes and slots that would corrupt it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from glm_kernels.cache import layout

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Block tables are int32: a slot past this cannot be looked up.
MAX_SLOTS = 2**31

_SLOT_DTYPES = (torch.int32, torch.int64)


def check_pool_size(size: int, page_size: int) -> None:
    """Refuse a pool that does not consist of pages a block table can name.

    Args:
        size: Tokens, without the page that padding writes to.
        page_size: Tokens a page.

    Raises:
        ValueError: names the size, what was expected and the flag to change.
    """
    # A draft's pool under decode context parallelism has the pages of all ranks in one.
    if page_size % layout.PAGE_SIZE or page_size == 0:
        raise ValueError(
            f"page_size is {page_size}, expected a multiple of {layout.PAGE_SIZE}: index pages hold "
            "that many keys"
        )
    if size < page_size or size % page_size:
        raise ValueError(
            f"the pool has {size} tokens, expected whole pages of {page_size} and at least one; raise "
            "--max-total-tokens or --mem-fraction-static"
        )
    if size + page_size > MAX_SLOTS:
        raise ValueError(
            f"the pool has {size} tokens, expected at most {MAX_SLOTS - page_size}: block tables hold "
            "32-bit slots; lower --max-total-tokens"
        )


def check_row_format(dtype: torch.dtype, row_dim: int, latent_dim: int, rope_dim: int) -> None:
    """Refuse latent rows in none of the three forms of docs/kv-layout.md.

    Args:
        dtype: dtype of the cache.
        row_dim: Elements a row.
        latent_dim: Latent values of a position.
        rope_dim: Rotary values of a position.

    Raises:
        ValueError: names what was got and what was expected.
    """
    dims = (latent_dim, rope_dim)
    if dims != (layout.KV_LORA_RANK, layout.QK_ROPE_HEAD_DIM):
        raise ValueError(
            f"a position has {latent_dim} latent and {rope_dim} rotary values, expected "
            f"{layout.KV_LORA_RANK} and {layout.QK_ROPE_HEAD_DIM}"
        )
    forms = {
        torch.float32: layout.MLA_DIM,
        torch.bfloat16: layout.MLA_DIM,
        torch.float8_e4m3fn: layout.MLA_ROW_BYTES,
    }
    if forms.get(dtype) != row_dim:
        raise ValueError(
            f"latent rows are {row_dim} x {_name(dtype)}, expected {layout.MLA_DIM} x float32, "
            f"{layout.MLA_DIM} x bfloat16 or {layout.MLA_ROW_BYTES} x float8_e4m3fn; set --kv-cache-dtype"
        )


def check_slots(op: str, slots: torch.Tensor, num_slots: int, *, padding: bool = False) -> None:
    """Refuse slots outside the cache before any row is touched.

    Args:
        op: What is being done, for the message.
        slots: `[num_tokens]`, int32 or int64.
        num_slots: Slots of the cache, the padding page included.
        padding: Whether negative slots are allowed, as rows to skip.

    Raises:
        ValueError: names the first slot at fault and the range.
    """
    if slots.dim() != 1 or slots.dtype not in _SLOT_DTYPES:
        raise ValueError(
            f"{op}: slots are {list(slots.shape)} {_name(slots.dtype)}, expected [num_tokens] int32 or int64"
        )
    if slots.numel() == 0:
        return
    low, high = slots.aminmax()
    if int(high) >= num_slots or (not padding and int(low) < 0):
        wrong = int(high) if int(high) >= num_slots else int(low)
        raise ValueError(
            f"{op}: slot {wrong} is outside the cache, expected 0 to {num_slots - 1}; the block table is stale"
        )


def check_page_runs(op: str, slots: torch.Tensor) -> None:
    """Refuse slots that are not page after page in order, of which only the last may be cut short.

    Index pages are copied whole: any other order would put them out of step with the latent rows.

    Args:
        op: What is being done, for the message.
        slots: `[num_tokens]`, each a valid slot.

    Raises:
        ValueError: names the first position at fault.
    """
    offsets = torch.arange(len(slots), device=slots.device)
    starts = slots[offsets // layout.PAGE_SIZE * layout.PAGE_SIZE]
    wrong = (starts % layout.PAGE_SIZE != 0) | (slots != starts + offsets % layout.PAGE_SIZE)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: position {first} is in slot {int(slots[first])}, expected whole pages of "
            f"{layout.PAGE_SIZE} slots in order"
        )


def check_saved_rows(
    op: str, buffers: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], num_rows: int
) -> None:
    """Refuse saved rows that are not those of this pool's layers.

    Args:
        op: What is being done, for the message.
        buffers: A layer's cache each, `[rows, ...]`; a layer without storage has no rows.
        saved: What was saved of each layer.
        num_rows: Rows to restore in a layer that has storage.

    Raises:
        ValueError: names the layer, and both formats.
    """
    if len(saved) != len(buffers):
        raise ValueError(
            f"{op}: {len(saved)} layers were saved, expected {len(buffers)} as in this pool"
        )
    for layer, (buffer, rows) in enumerate(zip(buffers, saved, strict=True)):
        expected = (num_rows if buffer.shape[0] else 0, *buffer.shape[1:])
        if tuple(rows.shape) != expected or rows.dtype != buffer.dtype:
            raise ValueError(
                f"{op}: layer {layer} was saved as {list(rows.shape)} {_name(rows.dtype)}, expected "
                f"{list(expected)} {_name(buffer.dtype)}; restore it into the kind of pool that it came from"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
