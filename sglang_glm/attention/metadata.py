"""Which rows of a forward belong to which request, and what each of them sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """One request's rows of a forward.

    Attributes:
        first_row: Index of its first row among the batch's rows.
        num_rows: Its rows; row t of n sees positions below
            `cache_seqlen - unseen - (n - 1 - t) * stride`.
        slots: `[cache_seqlen]` int64, the slot where each position is read, new ones included: of the
            cache, or of the scratch that a sharded cache is gathered into.
        num_drafted: Of a draft step: the last positions that no target forward has verified.
        stride: Positions from one row to the next; above 1 where ranks take rows in turn.
        unseen: Newest positions that the last row does not see: rows of other ranks.
    """

    first_row: int
    num_rows: int
    slots: torch.Tensor
    num_drafted: int = 0
    stride: int = 1
    unseen: int = 0

    @property
    def cache_seqlen(self) -> int:
        """Length in the cache once this forward has written its rows."""
        return self.slots.shape[0]

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.first_row, self.first_row + self.num_rows)

    def row_lengths(self) -> torch.Tensor:
        """`[num_rows]` int64: how many positions each row sees."""
        last = self.cache_seqlen - self.unseen
        first = last - (self.num_rows - 1) * self.stride
        return torch.arange(first, last + 1, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """Every request of a forward that has rows, in row order."""

    requests: tuple[RequestRows, ...]


def plan_rows(
    forward_batch: ForwardBatch, req_to_token: torch.Tensor, *, draft_step: int = 0
) -> BatchRows:
    """Work out the rows of a forward from SGLang's batch.

    Args:
        forward_batch: After DP padding. Its mode decides how many rows a request has.
        req_to_token: `[max_requests, max_context]`, slot of each position of each request.
        draft_step: Step of a draft decode; its row sees `seq_lens + draft_step + 1` positions.

    Returns:
        The rows. An idle batch has none.
    """
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return BatchRows(requests=())
    batch_size = forward_batch.batch_size
    num_drafted = 0
    seq_lens = forward_batch.seq_lens[:batch_size].tolist()
    if mode.is_target_verify():
        num_draft_tokens = forward_batch.spec_info.draft_token_num
        row_counts = [num_draft_tokens] * batch_size
        lengths = [length + num_draft_tokens for length in seq_lens]
    elif mode.is_decode():
        row_counts = [1] * batch_size
        # SGLang counts the token of a decode row in `seq_lens`, but no token of a draft round.
        num_drafted = draft_step + 1 if forward_batch.spec_info is not None else 0
        lengths = [length + num_drafted for length in seq_lens]
    else:
        row_counts = [int(n) for n in forward_batch.extend_seq_lens_cpu[:batch_size]]
        lengths = seq_lens

    requests, first_row = [], 0
    pool_indices = forward_batch.req_pool_indices[:batch_size].tolist()
    for pool_index, num_rows, length in zip(pool_indices, row_counts, lengths, strict=True):
        if num_rows:
            slots = req_to_token[pool_index, :length].long()
            requests.append(
                RequestRows(
                    first_row=first_row, num_rows=num_rows, slots=slots, num_drafted=num_drafted
                )
            )
        first_row += num_rows
    return BatchRows(requests=tuple(requests))


def read_elsewhere(
    batch: BatchRows, translate: Callable[[torch.Tensor], torch.Tensor]
) -> BatchRows:
    """The same rows, whose positions are read where `translate` says instead of in the cache."""
    return BatchRows(
        requests=tuple(
            replace(request, slots=translate(request.slots)) for request in batch.requests
        )
    )


def take_turns(batch: BatchRows, rank: int, world_size: int) -> BatchRows:
    """The rows that a rank keeps when ranks take the rows of a batch in turn.

    Args:
        batch: All rows. Row i of them becomes row `i // world_size` of rank `i % world_size`.
        rank: Below `world_size`.
        world_size: Ranks of prefill context parallelism.

    Returns:
        This rank's rows; a request may have none.
    """
    kept = []
    for request in batch.requests:
        first = request.first_row + (rank - request.first_row) % world_size
        rows = range(first, request.first_row + request.num_rows, world_size)
        if rows:
            kept.append(
                replace(
                    request,
                    first_row=first // world_size,
                    num_rows=len(rows),
                    stride=world_size,
                    unseen=request.first_row + request.num_rows - 1 - rows[-1],
                )
            )
    return BatchRows(requests=tuple(kept))
