"""The indexer's scoring on CUDA: several rows of a request take our kernel, and ranks may divide rows."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs as sglang_envs
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.runtime_context import get_parallel

from sglang_glm import envs
from sglang_glm.attention import cuda_choice
from sglang_glm.compat.cuda.dsa_indexer_metadata import SomeRows
from sglang_glm.compat.cuda.dsa_topk_backend import ExactTopk
from sglang_glm.compat.cuda.warm_up import load_verify_kernels
from sglang_glm.layers.verify_selection import select_verify_rows
from sglang_glm.parallel.divided_requests import select_divided

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_glm.parallel.divided_requests import RankGroup

logger = logging.getLogger(__name__)


def get_topk_paged(
    original: Callable[..., torch.Tensor],
    indexer: Indexer,
    forward_batch: ForwardBatch,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
) -> torch.Tensor:
    """AROUND hook of `Indexer._get_topk_paged`: `[rows, index_topk]` int32 as SGLang's."""
    mode = forward_batch.forward_mode
    if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
        return original(indexer, forward_batch, layer_id, q_fp8, weights, metadata)
    cache_seqlens, table = metadata.get_seqlens_int32(), metadata.get_page_table_64()
    num_rows = table.shape[0]  # of requests; `q_fp8` may have padding after them
    choice = choose(indexer, metadata, cache_seqlens.shape[0], num_rows)
    group = dividing_group(cache_seqlens.shape[0])
    _log_choice(cache_seqlens.shape[0], num_rows, choice, 1 if group is None else group.world_size)
    if choice.form == "stock":
        return original(indexer, forward_batch, layer_id, q_fp8, weights, metadata)
    # Loaded when the backend was built: nothing is compiled while a graph is captured.
    load_verify_kernels(
        q_fp8.device.index or 0,
        indexer.n_heads,
        num_rows // cache_seqlens.shape[0],
        indexer.index_topk,
    )
    selected = select_verify_rows(
        q_fp8[:num_rows],
        weights[:num_rows].squeeze(-1).contiguous(),
        indexer._get_index_k_read_buffer(get_token_to_kv_pool(), layer_id),
        cache_seqlens,
        table,
        indexer.index_topk,
        return_slots=sglang_envs.SGLANG_DSA_FUSE_TOPK.get() and not metadata.force_unfused_topk,
        divided_over=group,
    )
    if num_rows == q_fp8.shape[0]:
        return selected
    padding = selected.new_full((q_fp8.shape[0] - num_rows, selected.shape[1]), -1)
    return torch.cat([selected, padding])


def get_topk_ragged(
    original: Callable[..., torch.Tensor],
    indexer: Indexer,
    enable_dual_stream: bool,
    forward_batch: ForwardBatch,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    topk_result: torch.Tensor | None = None,
) -> torch.Tensor:
    """AROUND hook of `Indexer._get_topk_ragged`: each rank may select for some of a prefill's rows.

    Args:
        original: SGLang's.
        indexer: The layer's indexer.
        enable_dual_stream: Passed on.
        forward_batch: The batch.
        layer_id: The layer.
        q_fp8: `[padded_rows, index_heads, 128]` e4m3; padding stands at the end.
        weights: `[padded_rows, index_heads, 1]`.
        metadata: SGLang's `DSAIndexerMetadata`.
        topk_result: Where the selections go; None allocates.

    Returns:
        `[padded_rows, index_topk]` int32, -1 in padding.
    """
    num_rows = (
        0 if forward_batch.seq_lens.numel() == 0 else metadata.get_seqlens_expanded().shape[0]
    )
    group = dividing_group(num_rows)
    arguments = (enable_dual_stream, forward_batch, layer_id)
    if group is None:
        return original(indexer, *arguments, q_fp8, weights, metadata, topk_result)

    def select(rows: range) -> torch.Tensor:
        some = slice(rows.start, rows.stop)
        return original(
            indexer, *arguments, q_fp8[some], weights[some], SomeRows(metadata, some), None
        )

    if topk_result is None:
        topk_result = q_fp8.new_full((q_fp8.shape[0], indexer.index_topk), -1, dtype=torch.int32)
    topk_result[:num_rows] = select_divided(select, num_rows, group)
    return topk_result


def choose(indexer: Indexer, metadata: Any, batch_size: int, num_rows: int) -> cuda_choice.Choice:
    """Whether our kernel scores these rows, and why.

    Args:
        indexer: The layer's indexer.
        metadata: SGLang's `DSAIndexerMetadata` of the batch.
        batch_size: Requests.
        num_rows: Rows of all requests.
    """
    named = isinstance(metadata.topk_backend, ExactTopk)
    obstacle = None
    if not named and envs.CUDA_KERNELS.get() == "named":
        obstacle = f"{envs.CUDA_KERNELS.name} is 'named', and no flag names our selection"
    elif not named and not metadata.topk_backend.is_sgl_kernel():
        obstacle = "a flag names another selection"
    elif not indexer.paged_mqa_logits_backend.is_deepgemm():
        obstacle = "a flag names another scoring kernel"
    elif indexer.num_init_tokens or indexer.num_local_tokens:
        obstacle = "positions that are always selected need the matrix of scores"
    elif batch_size == 0 or num_rows % batch_size:
        obstacle = f"{num_rows} rows do not divide over {batch_size} requests"
    if obstacle is not None:
        return cuda_choice.Choice(form="stock", reason=obstacle)
    return cuda_choice.choose_verify_selection(
        batch_size=batch_size,
        next_n=num_rows // batch_size,
        index_heads=indexer.n_heads,
        index_topk=indexer.index_topk,
        capability=_capability(),
        named=named,
    )


def dividing_group(batch_size: int) -> RankGroup | None:
    """The ranks that divide the scans of a batch among them, or None.

    A CUDA graph is captured once for histories of any length, so nothing that is known there says
    whether dividing pays: it is left to whoever knows the traffic.

    Args:
        batch_size: Requests, or rows of a prefill. Fewer than ranks would leave some without one.
    """
    if envs.DIVIDE_INDEX_SCAN.get() != "on":
        return None
    group = get_parallel().attn_tp_group
    return group if 1 < group.world_size <= batch_size else None


@functools.cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


@functools.cache
def _log_choice(batch_size: int, num_rows: int, choice: cuda_choice.Choice, num_ranks: int) -> None:
    """Say once a shape what scores and selects verify rows."""
    name = "DeepGEMM and SGLang's top-k"
    if choice.form != "stock":
        name = "glm_kernels" if num_ranks == 1 else f"glm_kernels, divided over {num_ranks} ranks"
    logger.info(
        "DSA verify selection, %d requests, %d rows: %s (%s)",
        batch_size,
        num_rows,
        name,
        choice.reason,
    )
