"""How far the indexers are from the attention that uses them, and from a wrong layout."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.indexer import index_inputs, rotate_halves

if TYPE_CHECKING:
    from collections.abc import Callable

    from cookbook.train_tiny.indexer import IndexParts
    from cookbook.train_tiny.model import LayerTrace, Model

LAYOUT_MARGIN = 4.0
"""Nats by which a server with another RoPE layout shall be further from the attention."""


def sample_rows(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Choose queries for the index loss: half anywhere, half among answers.

    Args:
        weights: ``[rows, length]``, of predicting the token after each.
        count: Queries a sequence, even.

    Returns:
        ``[rows, count]``, positions.
    """
    rows, length = weights.shape
    anywhere = torch.randint(length, (rows, count // 2), device=weights.device)
    answers = torch.multinomial(weights.square() + 1e-3, count // 2, replacement=True)
    return torch.cat([anywhere, answers], 1)


def index_loss(
    model: Model,
    layer: int,
    group: list[LayerTrace],
    rows: torch.Tensor,
    table: torch.Tensor,
    layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence of an indexer from the attention of the layers that use it.

    Args:
        model: The model.
        layer: The indexer's layer.
        group: Its trace, then those of the shared layers after it.
        rows: ``[sequences, queries]``, positions; the second half of each are among answers.
        table: From ``rope_table``.
        layout: Whether the second scalar is wanted, else it is zero.

    Returns:
        Two scalars. Cross-entropy less the attention's entropy, averaged; over the whole context,
        and where a selection was used also over that. And by how much the divergence of a server
        that turns half-split pairs, at queries among answers, is short of ``LAYOUT_MARGIN`` more
        than the right one's.
    """
    sequences, count = rows.shape
    length = len(table) // sequences
    later = torch.arange(length, device=rows.device) > rows[..., None]  # [sequences, queries, keys]
    wanted = _attention(model, group, rows, later)
    scores = _scores(model.index_inputs, model, layer, group[0], rows, table)
    divergence = _divergence(scores, wanted, later)
    loss = divergence.mean()
    mask = group[0].mask
    if mask is not None:
        unseen = ~mask.flatten(0, 1)[_flat(rows, length)].unflatten(0, (sequences, count))
        loss = 0.5 * (loss + _divergence(scores, wanted, unseen).mean())
    if not layout:
        return loss, loss.new_zeros(())
    answers = slice(count // 2, None)
    halves = functools.partial(index_inputs, turn=rotate_halves)
    scores = _scores(halves, model, layer, group[0], rows[:, answers], table)
    wrong = _divergence(scores, wanted[:, answers], later[:, answers])
    return loss, F.relu(divergence[:, answers].detach() + LAYOUT_MARGIN - wrong).mean()


def _flat(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Positions ``[sequences, queries]`` as tokens."""
    return (rows + torch.arange(len(rows), device=rows.device)[:, None] * length).flatten()


@torch.no_grad()
def _attention(
    model: Model, group: list[LayerTrace], rows: torch.Tensor, later: torch.Tensor
) -> torch.Tensor:
    """What the group's heads attend to on average: ``[sequences, queries, keys]``."""
    sequences, count, length = later.shape
    flat = _flat(rows, length)
    wanted = torch.zeros(later.shape, device=rows.device)
    for member in group:
        q = member.q[flat].unflatten(0, (sequences, count))
        k = member.k.unflatten(0, (sequences, length))
        logits = torch.einsum("brhd,bshd->bhrs", q, k).float() * model.spec.qk_head_dim**-0.5
        logits.masked_fill_(later[:, None], float("-inf"))
        wanted += logits.softmax(-1).mean(1)
    return wanted / len(group)


def _scores(
    inputs: Callable[..., IndexParts],
    model: Model,
    layer: int,
    trace: LayerTrace,
    rows: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Index scores with a gradient for the indexer: ``[sequences, queries, keys]``."""
    sequences, count = rows.shape
    length = len(table) // sequences
    normed, q_latent = trace.normed.detach(), trace.q_latent.detach()
    flat = _flat(rows, length)
    q, k, weights = inputs(model.parameters, layer, normed, q_latent, table, model.spec, flat)
    q = q.unflatten(0, (sequences, count)).flatten(1, 2)
    terms = F.relu(q @ k.unflatten(0, (sequences, length)).transpose(1, 2))
    terms = terms.unflatten(1, (count, -1))  # [sequences, queries, heads, keys]
    weights = weights.unflatten(0, (sequences, count))
    return (weights.to(terms.dtype)[:, :, None] @ terms)[:, :, 0].float()


def _divergence(scores: torch.Tensor, wanted: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Of each query, ``[sequences, queries]``."""
    wanted = wanted.masked_fill(hidden, 0.0)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-6)
    given = scores.masked_fill(hidden, float("-inf")).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.xlogy(wanted, wanted) - wanted * given).sum(-1)
