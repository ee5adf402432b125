"""The lightning indexer on the CPU: writes the index key, then selects positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from glm_kernels.cache.index_pages import quantize_index_k
from glm_kernels.indexer.mqa_logits import mqa_logits
from sglang.srt.layers.cp.utils import cp_materialize_global_token_order, is_cp_active
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from sglang_glm.layers.draft_selection import carried_selection, extend_selection
from sglang_glm.layers.index_selection import select
from sglang_glm.parallel.index_agreement import settle_selection

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_glm.attention.metadata import RequestRows


def indexer_forward(
    self: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """Select the positions that each row attends to.

    ::

        k     = rope(layer_norm(wk(x)))
        q     = rope(wq_b(q_lora))                                   # [n, H, 128]
        score = sum_h(w_h * relu(q_h . k) * 128 ** -0.5),  w = weights_proj(x) * H ** -0.5

    Args:
        self: SGLang's indexer module; owns the weights.
        x: `[num_rows, hidden_size]`, the layer's normalised input.
        q_lora: `[num_rows, q_lora_rank]`, the normalised query latent.
        positions: `[num_rows]`.
        forward_batch: The batch; its cache slots receive the keys of all rows.
        layer_id: A full layer.
        return_indices: False writes the keys and selects nothing.

    Returns:
        `[num_rows, index_topk]` int32 request-local positions, best first, -1 padding at the tail.
        Padded rows select nothing. In a draft step a request that carries a selection reuses it.
    """
    batch = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    selected = torch.full((x.shape[0], self.index_topk), -1, dtype=torch.int32)
    # Written before anything is read, and even where nothing needs scoring now: a later step
    # searches this history.
    cache = get_token_to_kv_pool().index_key_cache
    key = _index_key(self, x, positions)
    if is_cp_active(forward_batch):
        # Ranks took the rows in turn; each needs the keys of all.
        key = cp_materialize_global_token_order(key, forward_batch)
    if batch.requests:
        cache.store(layer_id, forward_batch.out_cache_loc[: key.shape[0]].long(), key)
    if not return_indices:
        return None
    carried = carried_selection(forward_batch)
    scanned = []
    for request in batch.requests:
        reused = None if carried is None else _reuse(carried, request)
        if reused is not None:
            selected[request.rows] = reused
        elif request.cache_seqlen <= self.index_topk:
            selected[request.rows] = _select_all(request, self.index_topk)
        else:
            scanned.append(request)
    if scanned:
        query, weights = _index_query(
            self, x, q_lora, positions, quantized=cache.keys(layer_id).dtype == torch.uint8
        )

        def score(request: RequestRows, positions: range) -> torch.Tensor:
            keys = cache.load(layer_id, request.slots[positions.start : positions.stop])
            ends = (request.row_lengths() - positions.start).clamp(0, len(positions))
            return mqa_logits(
                query[request.rows], keys, weights[request.rows], torch.zeros_like(ends), ends
            )

        for request, chosen in zip(scanned, select(scanned, score, self.index_topk), strict=True):
            selected[request.rows] = chosen
    return maybe_capture_indexer_topk(layer_id, settle_selection(selected, layer_id))


def _reuse(carried: torch.Tensor, request: RequestRows) -> torch.Tensor | None:
    """The carried selection of a draft step's request with its drafted positions, or None."""
    verified_len = request.cache_seqlen - request.num_drafted
    return extend_selection(carried[request.first_row], verified_len, request.cache_seqlen)


def _select_all(request: RequestRows, index_topk: int) -> torch.Tensor:
    """Every visible position of each row, `[num_rows, index_topk]` int32."""
    positions = torch.arange(index_topk, dtype=torch.int32).expand(request.num_rows, -1)
    return positions.masked_fill(positions >= request.row_lengths()[:, None], -1)


def _index_key(self: Indexer, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Index keys of the rows, `[num_rows, 128]` in the model's dtype, rotated."""
    key = self.k_norm(self.wk(x)[0])
    return _rotate(self, key.unsqueeze(1), positions).squeeze(1)


def _index_query(
    self: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    *,
    quantized: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries and head weights.

    Returns:
        `[num_rows, heads, 128]` fp32 queries, rounded to e4m3 codes where the keys are, and
        `[num_rows, heads]` fp32 weights with every scale folded in.
    """
    query = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
    query = _rotate(self, query, positions)
    # The projection is stored in BF16; its product is formed in FP32, as the gate's is.
    weights = F.linear(x.float(), self.weights_proj.weight.float()) * (
        self.n_heads**-0.5 * self.softmax_scale
    )
    if not quantized:
        return query.float(), weights
    codes, scale = quantize_index_k(query.reshape(-1, self.head_dim))
    return codes.float().view(query.shape), weights * scale.view(weights.shape)


def _rotate(self: Indexer, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the first `rope_head_dim` values of each head of `[num_rows, heads, 128]`."""
    rope, rest = heads.split([self.rope_head_dim, self.head_dim - self.rope_head_dim], dim=-1)
    # SGLang's rotary module rotates a pair; the second of the pair is not used.
    rope, _ = self.rotary_emb(positions, rope.contiguous(), rope[:, :1].contiguous())
    return torch.cat([rope, rest], dim=-1)
