"""SGLang's `dsa` attention backend on CUDA, with our kernels among its implementations.

A subclass: metadata, graphs and every stock implementation stay SGLang's. `glm_sparse` is one more
implementation name; `glm_auto` decides for each batch shape between ours and the stock one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_verify import sparse_mla_verify
from glm_kernels.attention.union_slots import union_slots
from glm_kernels.cache.layout import KV_LORA_RANK, MLA_DIM, MLA_ROW_BYTES
from glm_kernels.indexer.topk_indices import positions_to_slots
from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general
from sglang.srt.layers.attention import dsa_backend

from sglang_glm.attention import cuda_choice
from sglang_glm.compat.cuda.dsa_topk_backend import ExactTopk
from sglang_glm.compat.cuda.warm_up import (
    load_attention_kernels,
    load_selection_kernels,
    load_verify_kernels,
)
from sglang_glm.speculative.drafted_slots import add_drafted, drafted_lengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

AUTO, SPARSE = "glm_auto", "glm_sparse"
#: Stock implementations that attend to the first entries of a selection, as many as metadata says;
#: the others look for -1.
_READ_LENGTHS = ("fa3", "flashmla_sparse", "flashinfer_sparse_mla")


def stock_decode(kv_dtype: str) -> str:
    """The stock implementation that serves the batches which `glm_auto` leaves to SGLang."""
    return "flashmla_kv" if kv_dtype == cuda_choice.FP8 else "flashmla_sparse"


class GlmDsaCudaAttnBackend(dsa_backend.DeepseekSparseAttnBackend):
    """Stock DSA backend that knows the implementation names `glm_sparse` and `glm_auto`."""

    dsa_decode_impl: str
    forward_metadata: Any

    def __init__(self, model_runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        self._kv_dtype = (
            cuda_choice.FP8
            if self.dsa_kv_cache_store_fp8
            else str(self.kv_cache_dtype).removeprefix("torch.")
        )
        self._decides = self.dsa_decode_impl == AUTO
        if self._decides:
            # The name under which SGLang keeps its own schedule for the batches that it serves.
            self.dsa_decode_impl = stock_decode(self._kv_dtype)
        self._union_of: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None
        if self._decides or SPARSE in (self.dsa_decode_impl, self.dsa_prefill_impl):
            self._prepare()
        if isinstance(self.dsa_topk_backend, ExactTopk):
            load_selection_kernels(torch.cuda.current_device(), self.dsa_index_topk)
        # SGLang serves other families with this backend too, some without an indexer of this form.
        hf_config = model_runner.model_config.hf_config
        self._load_verify_kernels(getattr(hf_config, "index_n_heads", 0))

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One row a request, or a draft step; `q` `[rows, heads, 512]`."""
        verified = topk_indices
        topk_indices = self._see_drafts(verified, forward_batch)
        form = self._form("decode", layer, q.shape[0], 1)
        if form == "stock" or topk_indices is None:
            with self._count_drafts(topk_indices is not verified, forward_batch):
                return super().forward_decode(
                    q,
                    k,
                    v,
                    layer,
                    forward_batch,
                    save_kv_cache,
                    q_rope=q_rope,
                    k_rope=k_rope,
                    topk_indices=topk_indices,
                    **kwargs,
                )
        self._write(layer, forward_batch, k, k_rope, save_kv_cache)
        return self._attend(form, q, q_rope, layer, topk_indices, 1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Prefill, verify and draft extend; `q` `[rows, heads, 512]`."""
        mode = forward_batch.forward_mode
        several = mode.is_target_verify() or mode.is_draft_extend_v2()
        next_n = self.speculative_num_draft_tokens if several else 1
        phase: cuda_choice.Phase = "verify" if several else "prefill"
        form = "stock" if self.use_mha else self._form(phase, layer, q.shape[0], next_n)
        if form == "stock" or topk_indices is None:
            return super().forward_extend(
                q,
                k,
                v,
                layer,
                forward_batch,
                save_kv_cache,
                q_rope=q_rope,
                k_rope=k_rope,
                topk_indices=topk_indices,
                **kwargs,
            )
        self._write(layer, forward_batch, k, k_rope, save_kv_cache)
        return self._attend(form, q, q_rope, layer, topk_indices, next_n)

    def _get_fused_topk_page_table(self, topk_indices: torch.Tensor) -> torch.Tensor:
        if isinstance(self.dsa_topk_backend, ExactTopk):
            return topk_indices
        return super()._get_fused_topk_page_table(topk_indices)

    def _form(
        self, phase: cuda_choice.Phase, layer: RadixAttention, rows: int, next_n: int
    ) -> cuda_choice.Form:
        if self.hisparse_coordinator is not None or self.dcp_size > 1 or rows == 0:
            return "stock"
        if rows % next_n:
            next_n = 1  # padded to the ranks of an attention group: rows stand alone
        impl = self.dsa_prefill_impl if phase == "prefill" else self.dsa_decode_impl
        if impl != SPARSE and (phase == "prefill" or not self._decides):
            return "stock"
        work = cuda_choice.AttentionWork(
            phase=phase,
            num_heads=layer.tp_q_head_num,
            batch_size=rows // next_n,
            next_n=next_n,
            kv_dtype=self._kv_dtype,
            peer=impl,
            capability=self.device_capability,
            page_size=self.physical_page_size,
        )
        if impl == SPARSE:
            return cuda_choice.named_form(work)
        return cuda_choice.choose_attention(work).form

    def _see_drafts(
        self, topk_indices: torch.Tensor | None, forward_batch: ForwardBatch
    ) -> torch.Tensor | None:
        """The selection with the slots drafted so far, in a draft step whose selection is slots."""
        is_draft_step = self.speculative_num_steps > 0 and self.topk == 1
        if topk_indices is None or not is_draft_step:
            return topk_indices
        # Unfused selections are positions, and the draft's page table ends at the verified length.
        # Another family pools its keys, and the tail of its selection has a meaning.
        are_slots = self.use_fused_topk and self.hisparse_coordinator is None
        if not are_slots or self.dsa_index_kpool > 1:
            return topk_indices
        seq_lens = forward_batch.seq_lens
        # More rows than requests: padded to the ranks of a group, and left as SGLang has it.
        if topk_indices.shape[0] != seq_lens.shape[0]:
            return topk_indices
        return add_drafted(
            topk_indices,
            seq_lens,
            self.speculative_step_id,
            self.req_to_token,
            forward_batch.req_pool_indices,
        )

    @contextlib.contextmanager
    def _count_drafts(self, drafted: bool, forward_batch: ForwardBatch) -> Iterator[None]:
        """Within, the metadata counts drafted slots for a stock kernel that reads that many."""
        if not drafted or self.dsa_decode_impl not in _READ_LENGTHS:
            yield
            return
        planned = self.forward_metadata
        lengths = drafted_lengths(
            forward_batch.seq_lens, self.speculative_step_id, self.dsa_index_topk
        )
        self.forward_metadata = dataclasses.replace(
            planned,
            dsa_cache_seqlens_int32=lengths,
            dsa_cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        )
        try:
            yield
        finally:
            self.forward_metadata = planned

    def _write(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        save_kv_cache: bool,
    ) -> None:
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)

    def _attend(
        self,
        form: cuda_choice.Form,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layer: RadixAttention,
        topk_indices: torch.Tensor,
        next_n: int,
    ) -> torch.Tensor:
        heads = layer.tp_q_head_num
        if q_rope is None:
            q_all = q.contiguous().view(-1, heads, MLA_DIM)
        else:
            q_all = concat_mla_absorb_q_general(
                q.view(-1, heads, KV_LORA_RANK), q_rope.view(-1, heads, MLA_DIM - KV_LORA_RANK)
            )
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self.dsa_kv_cache_store_fp8:
            cache = cache.view(torch.uint8)
        slots = self._slots(topk_indices, q_all.shape[0])
        if form == "glm_verify":
            lists, members, counts = self._union(slots, next_n)
            return sparse_mla_verify(q_all, cache, lists, members, counts, layer.scaling)[0]
        return sparse_mla(q_all, cache, slots, layer.scaling)[0]

    def _slots(self, topk_indices: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[num_rows, index_topk]` int32 physical slots."""
        if not self.use_fused_topk:
            metadata = self.forward_metadata
            topk_indices = positions_to_slots(
                topk_indices,
                metadata.real_page_table,
                self.physical_page_size,
                metadata.token_to_batch_idx,
            )
        return self._pad_topk_indices(topk_indices, num_rows)

    def _union(self, slots: torch.Tensor, next_n: int) -> tuple[torch.Tensor, ...]:
        """The plan of a selection; layers that share the selection hand over the same tensor."""
        if self._union_of is None or self._union_of[0] is not slots:
            self._union_of = (slots, union_slots(slots, next_n))
        return self._union_of[1]

    def _prepare(self) -> None:
        obstacle = cuda_choice.impossible(
            num_heads=self.num_q_heads,
            capability=self.device_capability,
            page_size=self.physical_page_size,
        )
        width = MLA_ROW_BYTES if self.dsa_kv_cache_store_fp8 else MLA_DIM
        if obstacle is None and self.kv_cache_dim != width:
            obstacle = f"our kernels read rows of {width}, the pool has rows of {self.kv_cache_dim}"
        if obstacle is not None:
            raise ValueError(
                f"--dsa-decode-backend or --dsa-prefill-backend {SPARSE}: {obstacle}; "
                "leave the flag out to use SGLang's"
            )
        load_attention_kernels(
            torch.cuda.current_device(),
            self.num_q_heads,
            self.dsa_kv_cache_store_fp8,
            self.dsa_index_topk,
            self.speculative_num_draft_tokens or 1,
        )
        if self._decides:
            _log_choices(
                self.num_q_heads, self._kv_dtype, self.dsa_decode_impl, self.device_capability
            )

    def _load_verify_kernels(self, index_heads: int) -> None:
        next_n = self.speculative_num_draft_tokens or 1
        choice = cuda_choice.choose_verify_selection(
            batch_size=cuda_choice.MIN_VERIFY_REQUESTS,
            next_n=next_n,
            index_heads=index_heads,
            index_topk=self.dsa_index_topk,
            capability=self.device_capability,
            page_size=self.physical_page_size,
        )
        if choice.form != "stock":
            load_verify_kernels(
                torch.cuda.current_device(), index_heads, next_n, self.dsa_index_topk
            )


@functools.cache
def _log_choices(num_heads: int, kv_dtype: str, peer: str, capability: tuple[int, int]) -> None:
    """Say once a process what was decided."""
    described = cuda_choice.describe(
        num_heads=num_heads, kv_dtype=kv_dtype, peer=peer, capability=capability
    )
    for batch, choice in described:
        form = peer if choice.form == "stock" else choice.form
        logger.info(
            "DSA %s, %d heads, %s: %s (%s)", batch, num_heads, kv_dtype, form, choice.reason
        )
