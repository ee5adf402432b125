"""Inputs for tests and benchmarks: ragged, shuffled, tied, and hostile where it matters."""

from dataclasses import dataclass

import torch

from glm_kernels.cache.index_pages import quantize_index_k, store_index_k
from glm_kernels.cache.layout import INDEX_PAGE_BYTES, MLA_DIM, PAGE_SIZE
from glm_kernels.cache.mla_rows import pack_mla_rows
from glm_kernels.testing.shapes import IndexerShape, MlaShape


def generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Seeded generator on a device."""
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedIndexer:
    """Arguments of paged scoring and selection."""

    q: torch.Tensor
    index_cache: torch.Tensor
    weights: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    max_context: int


def paged_indexer(
    shape: IndexerShape, seed: int = 0, device: str | torch.device = "cpu", spare_pages: int = 3
) -> PagedIndexer:
    """Random paged scoring problem over shuffled pages.

    Args:
        shape: row of the shapes table.
        seed: of the random numbers.
        device: of the tensors.
        spare_pages: pages that belong to no request.

    Returns:
        e4m3 queries, uint8 pages, fp32 weights of both signs, int32 lengths and table. Table
        entries past a request's length hold a value far outside the cache: reading through one
        faults.
    """
    rng = generator(seed, device)
    lengths = shape.lengths
    blocks = [max(0, -(-length // PAGE_SIZE)) for length in lengths]
    max_blocks = max(1, *blocks)
    num_pages = sum(blocks) + spare_pages
    order = torch.randperm(num_pages, generator=rng, device=device)
    table = torch.full((len(lengths), max_blocks), 2**30, dtype=torch.int32, device=device)
    used = 0
    for request, count in enumerate(blocks):
        table[request, :count] = order[used : used + count]
        used += count
    pages = torch.empty(num_pages, INDEX_PAGE_BYTES, dtype=torch.uint8, device=device)
    # In pieces: the fp32 keys of a long context would be four times its cache.
    for first in range(0, num_pages, 4096):
        count = min(4096, num_pages - first) * PAGE_SIZE
        slots = first * PAGE_SIZE + torch.arange(count, device=device)
        keys = torch.randn(count, 128, generator=rng, device=device)
        keys *= 0.1 + 2 * torch.rand(count, 1, generator=rng, device=device)
        store_index_k(pages, slots, keys)
    rows = len(lengths) * shape.next_n * shape.num_heads
    q, scale = quantize_index_k(torch.randn(rows, 128, generator=rng, device=device))
    heads = (len(lengths), shape.next_n, shape.num_heads)
    weights = torch.randn(heads, generator=rng, device=device) * scale.view(heads) * 0.02
    return PagedIndexer(
        q=q.view(*heads, 128),
        index_cache=pages,
        weights=weights,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table,
        max_context=max_blocks * PAGE_SIZE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMla:
    """Arguments of sparse MLA."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    slots: torch.Tensor
    softmax_scale: float


def sparse_mla_inputs(
    shape: MlaShape,
    packed: bool,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    hole_rate: float = 0.0,
    union: int | None = None,
) -> SparseMla:
    """Random sparse MLA problem.

    Args:
        shape: row of the shapes table. ``shared`` tokens in a row form one request.
        packed: 656-byte rows, else rows of ``dtype``.
        seed: of the random numbers.
        device: of the tensors.
        dtype: of the queries, and of an unpacked cache.
        hole_rate: share of the slots that become -1, anywhere in a row. The first token then has no
            valid slot and the second, if there is one, a single valid slot.
        union: rows that the tokens of a request choose from; None chooses from the whole cache.

    Returns:
        Queries, cache, int32 slots (unique in a row) and the model's softmax scale.
    """
    rng = generator(seed, device)
    q = torch.randn(shape.num_tokens, shape.num_heads, MLA_DIM, generator=rng, device=device)
    cache = torch.empty(
        shape.num_slots,
        1,
        656 if packed else MLA_DIM,
        dtype=torch.uint8 if packed else dtype,
        device=device,
    )
    for first in range(0, shape.num_slots, 1 << 17):
        count = min(1 << 17, shape.num_slots - first)
        rows = torch.randn(count, MLA_DIM, generator=rng, device=device)
        rows *= 0.2 + torch.rand(count, 1, generator=rng, device=device)
        part = cache[first : first + count, 0]
        part.copy_(pack_mla_rows(rows[:, :512], rows[:, 512:]) if packed else rows)
    slots = torch.empty(shape.num_tokens, shape.topk, dtype=torch.int32, device=device)
    pool = torch.arange(shape.num_slots, device=device)
    for token in range(shape.num_tokens):
        if union is not None and token % shape.shared == 0:
            pool = torch.randperm(shape.num_slots, generator=rng, device=device)[:union]
        pick = torch.randperm(pool.numel(), generator=rng, device=device)[: shape.topk]
        slots[token, : pick.numel()] = pool[pick].int()
        slots[token, pick.numel() :] = -1
    if hole_rate:
        holes = torch.rand(slots.shape, generator=rng, device=device) < hole_rate
        slots.masked_fill_(holes, -1)
        slots[0] = -1
        if shape.num_tokens > 1:
            slots[1] = -1
            slots[1, shape.topk // 2] = shape.num_slots - 1
    return SparseMla(q=q.to(dtype), kv_cache=cache, slots=slots, softmax_scale=256**-0.5)


def score_rows(
    kind: str, num_tokens: int, width: int, seed: int = 0, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Logits of a kind that has broken selection kernels.

    Args:
        kind: ``normal``; ``plateau`` (100 winners, the rest exact zeros of both signs); ``relu``
            (nine in ten exact zeros); ``bf16`` (few distinct values); ``near_ties`` (values that
            share their high bits); ``constant``; ``special`` (infinities and NaN among the values);
            ``all_hidden`` (-inf and NaN only).
        num_tokens: rows.
        width: columns.
        seed: of the random numbers.
        device: of the result.

    Returns:
        ``[num_tokens, width]``, fp32.

    Raises:
        ValueError: on an unknown kind.
    """
    rng = generator(seed, device)
    x = torch.randn(num_tokens, width, generator=rng, device=device)
    u = torch.rand(num_tokens, width, generator=rng, device=device)
    if kind == "normal":
        return x
    if kind == "plateau":
        rank = u.argsort(dim=1).argsort(dim=1)
        return torch.where(rank < 100, 1 + x.abs(), torch.where(x > 0, 0.0, -0.0))
    if kind == "relu":
        return (x - 1.28).clamp_min(0)
    if kind == "bf16":
        return x.bfloat16().float()
    if kind == "near_ties":
        bits = torch.tensor([1.5], device=device).view(torch.int32) + (u * 300).int()
        return bits.view(torch.float32)
    if kind == "constant":
        return torch.full_like(x, -2.5)
    if kind == "special":
        x = torch.where(u < 0.05, float("inf"), x)
        x = torch.where((u > 0.1) & (u < 0.2), float("-inf"), x)
        return torch.where((u > 0.3) & (u < 0.4), float("nan"), x)
    if kind == "all_hidden":
        return torch.where(u < 0.5, float("nan"), float("-inf")).to(torch.float32)
    raise ValueError(f"score_rows: kind is {kind!r}, expected one of {SCORE_KINDS}")


SCORE_KINDS = (
    "normal",
    "plateau",
    "relu",
    "bf16",
    "near_ties",
    "constant",
    "special",
    "all_hidden",
)
