"""Compile and load our kernels when a backend is built: neither can be done while a graph is captured."""

import functools

import torch
from glm_kernels.attention import sparse_mla_few_heads_sm90 as few_heads
from glm_kernels.attention.sparse_mla import sparse_mla
from glm_kernels.attention.sparse_mla_verify import sparse_mla_verify
from glm_kernels.attention.union_slots import union_slots
from glm_kernels.cache.layout import INDEX_HEAD_DIM, INDEX_PAGE_BYTES, MLA_DIM, MLA_ROW_BYTES
from glm_kernels.indexer import paged_mqa_topk_sm90
from glm_kernels.indexer.topk_indices import topk_indices
from glm_kernels.indexer.topk_indices_sm90 import CAPACITY

from sglang_glm.attention.cuda_choice import fits_shared_gather


@functools.cache
def load_attention_kernels(
    device_index: int, num_heads: int, packed: bool, index_topk: int, next_n: int
) -> None:
    """Run sparse MLA, and its verify form where it can serve, on one page of zeros.

    Args:
        device_index: CUDA device.
        num_heads: Query heads of this rank.
        packed: 656-byte rows, otherwise BF16.
        index_topk: Entries of a selection.
        next_n: Rows a request in verify.
    """
    device = torch.device("cuda", device_index)
    cache = (
        torch.zeros(64, 1, MLA_ROW_BYTES, dtype=torch.uint8, device=device)
        if packed
        else torch.zeros(64, 1, MLA_DIM, dtype=torch.bfloat16, device=device)
    )
    q = torch.zeros(next_n, num_heads, MLA_DIM, dtype=torch.bfloat16, device=device)
    slots = torch.full((next_n, index_topk), -1, dtype=torch.int32, device=device)
    slots[:, 0] = 0
    sparse_mla(q, cache, slots, 1.0)
    if few_heads.accepts(q, cache, slots):
        # Its form follows the number of rows.
        for cluster in few_heads.CLUSTERS:
            few_heads.sparse_mla_few_heads_sm90(q, cache, slots, 1.0, cluster=cluster)
    if fits_shared_gather(num_heads, next_n):
        sparse_mla_verify(q, cache, *union_slots(slots, next_n), 1.0)


@functools.cache
def load_selection_kernels(device_index: int, index_topk: int) -> None:
    """Run the selection over a matrix once."""
    topk_indices(torch.zeros(1, 64, device=torch.device("cuda", device_index)), index_topk)


@functools.cache
def load_verify_kernels(device_index: int, index_heads: int, next_n: int, index_topk: int) -> None:
    """Run both ways of scoring and selecting verify rows once, on one page of zeros.

    Args:
        device_index: CUDA device.
        index_heads: Heads of the indexer.
        next_n: Rows a request.
        index_topk: Entries of a selection.
    """
    device = torch.device("cuda", device_index)
    q = torch.zeros(1, next_n, index_heads, INDEX_HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    cache = torch.zeros(1, INDEX_PAGE_BYTES, dtype=torch.uint8, device=device)
    weights = torch.zeros(1, next_n, index_heads, device=device)
    lengths = torch.full((1,), next_n, dtype=torch.int32, device=device)
    # Wide enough that the single pass takes a sample of the pages.
    table = torch.zeros(1, 2 * CAPACITY // 64, dtype=torch.int32, device=device)
    inputs = (q, cache, weights, lengths, table)
    paged_mqa_topk_sm90.paged_mqa_topk_sm90(*inputs, index_topk, return_slots=True)
    paged_mqa_topk_sm90.select_in_one_pass(*inputs, index_topk, return_slots=True)
