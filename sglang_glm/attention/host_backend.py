"""SGLang's `dsa` attention backend on the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from glm_kernels.attention.masked_mla import masked_mla
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.cache.layout import KV_LORA_RANK, MLA_DIM
from glm_kernels.indexer.topk_indices import positions_to_slots
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.kv_shard_hooks import (
    get_kv_shard_pool,
    prepare_kv_shard_forward,
)
from sglang.srt.layers.cp.utils import is_cp_active
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_glm.attention.metadata import (
    BatchRows,
    RequestRows,
    plan_rows,
    read_elsewhere,
    take_turns,
)
from sglang_glm.parallel.history_stripes import local_slots

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

#: Rows of all heads, with the log-sum-exp beside them where other ranks hold the rest of a history.
AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class GlmDsaHostAttnBackend(AttentionBackend):
    """Sparse MLA in absorbed form over the paged pool, request by request.

    The indexer hands over request-local positions; slots are looked up here, at the last moment.
    """

    needs_cpu_seq_lens = True
    #: SGLang asks for the dense multi-head form by this switch; every form here is absorbed.
    use_mha = False

    def __init__(
        self,
        model_runner: ModelRunner,
        skip_prefill: bool = False,
        speculative_step_id: int = 0,
        topk: int = 0,
        speculative_num_steps: int = 0,
        seed_dsa_topk_from_draft_extend: bool = False,
    ) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.shard_pool = get_kv_shard_pool(self.token_to_kv_pool)
        self.index_topk = model_runner.model_config.hf_config.index_topk
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.draft_step = speculative_step_id
        kernel = get_exec().kernel
        self.prefill_form = kernel.dsa_prefill_backend
        self.decode_form = kernel.dsa_decode_backend
        self.forward_metadata: BatchRows = BatchRows(requests=())
        parallel = get_parallel()
        # A draft's cache is whole on every rank.
        self.stripes = 1 if model_runner.is_draft_worker else parallel.attn_dcp_size
        self.stripe = parallel.attn_dcp_rank if self.stripes > 1 else 0

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the rows of this forward."""
        req_to_token = self.req_to_token_pool.req_to_token
        self.forward_metadata = plan_rows(forward_batch, req_to_token, draft_step=self.draft_step)
        if self.shard_pool is not None and prepare_kv_shard_forward(
            self.shard_pool, req_to_token, forward_batch
        ):
            self.forward_metadata = read_elsewhere(
                self.forward_metadata, self.shard_pool.translate_loc_to_scratch
            )
        if is_cp_active(forward_batch):
            parallel = get_parallel()
            self.forward_metadata = take_turns(
                self.forward_metadata, parallel.attn_cp_rank, parallel.attn_cp_size
            )

    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> BatchRows:
        """The plan of this forward, for the indexer.

        An idle forward has no rows. SGLang does not plan it for a draft step, whose backend still
        holds the plan of an earlier round, and drops the plan of others.
        """
        if forward_batch.forward_mode.is_idle():
            return BatchRows(requests=())
        return self.forward_metadata

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length that padded requests claim."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The same, under the name that SGLang's CPU engine asks by."""
        return self.get_cuda_graph_seq_len_fill_value()

    def forward_decode(self, *args: Any, **kwargs: Any) -> AttentionResult:
        """One row a request; see `forward_extend`."""
        return self._forward(self.decode_form, *args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> AttentionResult:
        """Prefill, verify and draft extend: `q` `[rows, heads, 512]` to `[rows, heads * 512]`.

        Under decode context parallelism `q` has the heads of all ranks, and the result is partial,
        over the positions that this rank stores: with it comes `[rows, heads]` fp32, the base-2
        log-sum-exp that joins the parts.
        """
        return self._forward(self.prefill_form, *args, **kwargs)

    def _forward(
        self,
        form: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> AttentionResult:
        if q_rope is None or k_rope is None:
            raise RuntimeError(
                f"layer {layer.layer_id} sent no rotary parts; only absorbed MLA is served"
            )
        if topk_indices is None:
            raise RuntimeError(
                f"layer {layer.layer_id} has no selection: it shares the index of an earlier layer, "
                "and none was handed on"
            )
        if save_kv_cache:
            self.token_to_kv_pool.set_mla_kv_buffer(
                layer, KVWriteLoc.for_batch(forward_batch), k, k_rope
            )
        q_all = q.new_empty(q.shape[0], layer.tp_q_head_num, MLA_DIM)
        q_all[..., :KV_LORA_RANK] = q.view(-1, layer.tp_q_head_num, KV_LORA_RANK)
        q_all[..., KV_LORA_RANK:] = q_rope
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, KV_LORA_RANK)
        lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float32)
        for request in self.get_indexer_metadata(layer.layer_id, forward_batch).requests:
            rows = request.rows
            out[rows], lse[rows] = self._attend(
                form, q_all[rows], request, topk_indices[rows], layer
            )
        if self.stripes > 1:
            return out.view(q.shape[0], -1), lse / math.log(2.0)
        return out.view(q.shape[0], -1)

    def _attend(
        self,
        form: str,
        q: torch.Tensor,
        request: RequestRows,
        topk_positions: torch.Tensor,
        layer: RadixAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a request's rows and its natural log-sum-exp."""
        selects_all = request.cache_seqlen <= self.index_topk
        if self.stripes > 1:
            form = "glm_sparse"  # the masked form reads a whole history
        if form == "glm_auto":
            form = (
                "glm_masked" if selects_all or self._masking_is_cheaper(request) else "glm_sparse"
            )
        if form == "glm_masked":
            latents = self.token_to_kv_pool.latent_rows(layer.layer_id, request.slots)
            selection = None if selects_all else topk_positions
            return masked_mla(q, latents, request.row_lengths(), layer.scaling, selection)
        slots = positions_to_slots(topk_positions, request.slots[None], page_size=1)
        if self.stripes > 1:
            slots = local_slots(slots, self.stripe, self.stripes)
        cache = self.token_to_kv_pool.latent_cache(layer.layer_id)
        return sparse_mla(q, cache, slots, layer.scaling)

    def _masking_is_cheaper(self, request: RequestRows) -> bool:
        # A gathered row is copied and multiplied in small batched products, at about a quarter of
        # the rate of one large product over the whole context.
        return request.cache_seqlen <= 4 * self.index_topk and request.num_rows > 1
