"""The indexer's metadata of an extend batch, restricted to some of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class SomeRows:
    """What SGLang's `_get_topk_ragged` asks of `DSAIndexerMetadata`, for consecutive rows of a batch.

    Keys, page tables and lengths of requests stay those of the whole batch: a row's window among the
    concatenated keys does not depend on which rows are scored.
    """

    def __init__(self, metadata: Any, rows: slice) -> None:
        self._metadata, self._rows = metadata, rows
        offsets = metadata.attn_metadata.topk_indices_offset
        self.attn_metadata = SimpleNamespace(
            topk_indices_offset=None if offsets is None else offsets[rows]
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First key and end of each row's window, `[rows]` int32 each."""
        starts, ends = self._metadata.get_indexer_kvcache_range()
        return starts[self._rows], ends[self._rows]

    def get_seqlens_expanded(self) -> torch.Tensor:
        """`[rows]` int32, positions that each row sees."""
        return self._metadata.get_seqlens_expanded()[self._rows]

    def get_token_to_batch_idx(self) -> torch.Tensor | None:
        """`[rows]`, request of each row."""
        owners = self._metadata.get_token_to_batch_idx()
        return None if owners is None else owners[self._rows]

    def topk_transform(
        self, logits: torch.Tensor, topk: int, *, ks: torch.Tensor, **of_chunk: Any
    ) -> torch.Tensor:
        """As SGLang's; a call for all rows at once becomes one for a chunk of the batch.

        Args:
            logits: `[rows, keys]` fp32.
            topk: Entries a row.
            ks: `[rows]` int32, first key of each row's window.
            of_chunk: What SGLang passes for a chunk of these rows, already cut to it.
        """
        if not of_chunk:
            offsets = self.attn_metadata.topk_indices_offset
            of_chunk = {"ke_offset": self.get_seqlens_expanded()}
            if offsets is not None:
                of_chunk["topk_indices_offset_override"] = offsets
            else:
                # Each row as a request of one token, as SGLang does it for its chunks.
                of_chunk["cu_seqlens_q"] = torch.ones_like(ks)
                of_chunk["batch_idx_list"] = self.get_token_to_batch_idx()
        return self._metadata.topk_transform(logits, topk, ks=ks, **of_chunk)
