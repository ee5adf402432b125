"""`--dsa-topk-backend glm_exact` on CUDA: our selection behind SGLang's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.runtime_context import get_exec, get_spec

from sglang_glm.layers.exact_selection import select_positions, select_ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.model_executor.model_runner import ModelRunner

EXACT = "glm_exact"


def resolve(
    original: Callable[[type, ModelRunner], Any], cls: type, model_runner: ModelRunner
) -> Any:
    """AROUND hook of `DSATopKBackend.resolve`: ours by its name, otherwise SGLang's choice."""
    name = (
        get_spec().speculative_dsa_topk_backend
        if model_runner.is_draft_worker
        else get_exec().kernel.dsa_topk_backend
    )
    return ExactTopk() if name == EXACT else original(cls, model_runner)


@dataclass(frozen=True, slots=True)
class ExactTopk:
    """What SGLang asks of a top-k backend."""

    value: str = EXACT

    def is_sgl_kernel(self) -> bool:
        """No: SGLang would call its own kernels."""
        return False

    def is_torch(self) -> bool:
        """No: SGLang would refuse fused selection."""
        return False

    def is_flashinfer(self) -> bool:
        """No: SGLang would call FlashInfer."""
        return False

    def should_use_topk_v2(self) -> bool:
        """No: ours needs no plan."""
        return False

    def topk_func(
        self,
        score: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        row_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Request-local positions, `[rows, topk]` int32."""
        return select_positions(score, lengths, topk, row_starts)

    def topk_transform(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        topk_transform_method: TopkTransformMethod,
        attn_metadata: Any,
        cu_seqlens_q_topk: torch.Tensor | None = None,
        topk_indices_offset: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: Any = None,
        force_unfused_topk: bool = False,
    ) -> torch.Tensor:
        """Select, and address what the attention of this batch reads.

        Returns:
            `[rows, topk]` int32: physical slots (PAGED), places among the batch's keys (RAGGED), or
            request-local positions where fusing is off.

        Raises:
            ValueError: RAGGED without offsets, or rows that belong to no known request.
        """
        if not envs.SGLANG_DSA_FUSE_TOPK.get() or force_unfused_topk:
            return self.topk_func(logits, lengths, topk, row_starts)
        if topk_transform_method == TopkTransformMethod.RAGGED:
            if topk_indices_offset is None:
                raise ValueError(f"{EXACT}: a ragged batch came without offsets of its requests")
            return select_ragged(logits, lengths, topk, topk_indices_offset, row_starts)
        table = attn_metadata.real_page_table
        row_to_batch = self._owners(logits.shape[0], table.shape[0], attn_metadata, batch_idx_list)
        return select_positions(logits, lengths, topk, row_starts, table, row_to_batch)

    def _owners(
        self, num_rows: int, table_rows: int, attn_metadata: Any, batch_idx_list: Any
    ) -> torch.Tensor | None:
        """Request of each row; None where each row has a table of its own."""
        if isinstance(batch_idx_list, torch.Tensor):
            return batch_idx_list
        if batch_idx_list is not None:
            raise ValueError(
                f"{EXACT} does not select for context-parallel prefill; "
                "leave --dsa-topk-backend out with --attn-cp-size above 1"
            )
        if num_rows == table_rows:
            return None
        owners = attn_metadata.token_to_batch_idx
        if owners is None or owners.shape[0] != num_rows:
            raise ValueError(
                f"{EXACT}: {num_rows} rows of scores and {table_rows} page tables, "
                "and nothing says which belongs to which"
            )
        return owners
