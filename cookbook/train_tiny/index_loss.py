"""How far the indexers are from the attention that uses what they select."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from cookbook.train_tiny.model import LayerTrace, Model


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
    model: Model, layer: int, group: list[LayerTrace], rows: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Divergence of an indexer from the attention of the layers that use it.

    Args:
        model: The model.
        layer: The indexer's layer.
        group: Its trace, then those of the shared layers after it.
        rows: ``[sequences, queries]``, positions.
        table: From ``rope_table``.

    Returns:
        Cross-entropy less the attention's entropy, averaged; over the whole context, and where a
        selection was used also over that.
    """
    sequences, count = rows.shape
    length = len(table) // sequences
    later = torch.arange(length, device=rows.device) > rows[..., None]  # [sequences, queries, keys]
    wanted = attention(model, group, rows, later)
    normed, q_latent = group[0].normed.detach(), group[0].q_latent.detach()
    scores = scores_of(model, layer, normed, q_latent, rows, table)
    loss = divergence(scores, wanted, later).mean()
    mask = group[0].mask
    if mask is not None:
        unseen = ~mask.flatten(0, 1)[_flat(rows, length)].unflatten(0, (sequences, count))
        loss = 0.5 * (loss + divergence(scores, wanted, unseen).mean())
    return loss


def _flat(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Positions ``[sequences, queries]`` as tokens."""
    return (rows + torch.arange(len(rows), device=rows.device)[:, None] * length).flatten()


@torch.no_grad()
def attention(
    model: Model, group: list[LayerTrace], rows: torch.Tensor, later: torch.Tensor
) -> torch.Tensor:
    """What the heads of some layers attend to, averaged.

    Args:
        model: The model.
        group: The layers' traces.
        rows: ``[sequences, queries]``, positions.
        later: ``[sequences, queries, length]``, bool, positions after each.

    Returns:
        ``[sequences, queries, length]``, FP32; each query's sum is 1.
    """
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


def scores_of(
    model: Model,
    layer: int,
    normed: torch.Tensor,
    q_latent: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Index scores of some queries, with a gradient.

    Args:
        model: The model.
        layer: The indexer's layer.
        normed: ``[tokens, hidden]``, its input.
        q_latent: ``[tokens, q_lora_rank]``.
        rows: ``[sequences, queries]``, positions.
        table: From ``rope_table``.

    Returns:
        ``[sequences, queries, length]``, FP32; later positions are not masked.
    """
    sequences, count = rows.shape
    length = len(table) // sequences
    q, k, weights = model.index_inputs(
        model.parameters, layer, normed, q_latent, table, model.spec, _flat(rows, length)
    )
    q = q.unflatten(0, (sequences, count)).flatten(1, 2)
    terms = F.relu(q @ k.unflatten(0, (sequences, length)).transpose(1, 2))
    terms = terms.unflatten(1, (count, -1))  # [sequences, queries, heads, keys]
    weights = weights.unflatten(0, (sequences, count))
    return (weights.to(terms.dtype)[:, :, None] @ terms)[:, :, 0].float()


def divergence(scores: torch.Tensor, wanted: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of softmaxed scores from the attention, where it is visible.

    Args:
        scores: ``[sequences, queries, length]``, FP32.
        wanted: The same shape; renormalized over what is visible.
        hidden: The same shape, bool.

    Returns:
        ``[sequences, queries]``.
    """
    wanted = wanted.masked_fill(hidden, 0.0)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-6)
    given = scores.masked_fill(hidden, float("-inf")).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.xlogy(wanted, wanted) - wanted * given).sum(-1)
