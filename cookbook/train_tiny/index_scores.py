"""Index scores of whole sequences without gradient: one Triton kernel, one plain form.

``score[b, t, s] = sum_h weights[b, t, h] * relu(q[b, t, h] . k[b, s])`` for ``s <= t``, else -inf.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without an accelerator
    triton = None

_QUERIES = 16
_KEYS = 128
_CHUNK = 128


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Score every earlier position of every query.

    Args:
        q: ``[rows, length, heads, width]``.
        k: ``[rows, length, width]``.
        weights: ``[rows, length, heads]``, with all constant factors.

    Returns:
        ``[rows, length, length]``, FP32.
    """
    if q.is_cuda and triton is not None and q.shape[1] % _KEYS == 0:
        return _index_scores_triton(q, k, weights)
    return index_scores_torch(q, k, weights)


def check_kernel() -> dict[str, object]:
    """Compare the kernel with the plain form, which takes its place from then on if they differ.

    Returns:
        ``error``, relative to the largest score, and ``agrees``; or ``problem`` and ``agrees``.
    """
    global triton
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, device="cuda", generator=generator)
    q = draw(2, 256, 32, 128, dtype=torch.bfloat16)
    k = draw(2, 256, 128, dtype=torch.bfloat16)
    weights = draw(2, 256, 32)
    try:
        got, wanted = index_scores(q, k, weights), index_scores_torch(q, k, weights)
        seen = wanted.isfinite()
        error = ((got - wanted)[seen].abs().max() / wanted[seen].abs().max()).item()
        agrees = error < 0.02 and bool((got.isfinite() == seen).all())
        found: dict[str, object] = {"error": error, "agrees": agrees}
    except Exception as problem:
        found = {"problem": repr(problem)[:500], "agrees": False}
    if not found["agrees"]:
        triton = None
    return found


def index_scores_torch(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As :func:`index_scores`, on any device."""
    rows, length, heads, _ = q.shape
    out = q.new_full((rows, length, length), float("-inf"), dtype=torch.float32)
    for start in range(0, length, _CHUNK):
        end = min(start + _CHUNK, length)
        terms = q[:, start:end].flatten(1, 2) @ k[:, :end].transpose(1, 2)
        terms = F.relu(terms).unflatten(1, (-1, heads)).float()  # [rows, chunk, heads, keys]
        out[:, start:end, :end] = torch.einsum(
            "bthk,bth->btk", terms, weights[:, start:end].float()
        )
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    return out.masked_fill_(later, float("-inf"))


if triton is not None:

    @triton.jit
    def _index_scores_kernel(
        q_ptr,
        k_ptr,
        weights_ptr,
        out_ptr,
        length,
        heads: tl.constexpr,
        width: tl.constexpr,
        queries: tl.constexpr,
        keys: tl.constexpr,
    ):
        """Score ``queries`` consecutive queries against ``keys`` consecutive keys."""
        row = tl.program_id(2).to(tl.int64)
        first_query = tl.program_id(1) * queries
        first_key = tl.program_id(0) * keys
        key = first_key + tl.arange(0, keys)
        head = tl.arange(0, heads)
        column = tl.arange(0, width)
        if first_key < first_query + queries:
            k = tl.load(k_ptr + (row * length + key[:, None]) * width + column[None, :])
            k_t = tl.trans(k)
            for step in range(queries):
                query = first_query + step
                token = row * length + query
                q = tl.load(q_ptr + (token * heads + head[:, None]) * width + column[None, :])
                weight = tl.load(weights_ptr + token * heads + head)
                terms = tl.maximum(tl.dot(q, k_t), 0.0) * weight[:, None]
                score = tl.sum(terms, 0)
                score = tl.where(key <= query, score, float("-inf"))
                tl.store(out_ptr + token * length + key, score)
        else:
            nothing = tl.full((keys,), float("-inf"), tl.float32)
            for step in range(queries):
                token = row * length + first_query + step
                tl.store(out_ptr + token * length + key, nothing)


def _index_scores_triton(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, length, heads, width = q.shape
    out = torch.empty(rows, length, length, dtype=torch.float32, device=q.device)
    grid = (length // _KEYS, length // _QUERIES, rows)
    _index_scores_kernel[grid](
        q.contiguous(),
        k.contiguous(),
        weights.float().contiguous(),
        out,
        length,
        heads,
        width,
        _QUERIES,
        _KEYS,
    )
    return out
