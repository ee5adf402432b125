"""What is minimised: the next token, the MTP chain, and the indexers' distance to attention."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.indexer import index_inputs, rotate_halves
from cookbook.train_tiny.layers import rope_table
from cookbook.train_tiny.model import LayerTrace, Model
from cookbook.train_tiny.notes import CODE_WEIGHT
from cookbook.train_tiny.sequences import UNIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from cookbook.train_tiny.indexer import IndexParts
    from cookbook.train_tiny.model import Output

LAYOUT_MARGIN = 4.0
"""Nats by which a server with another RoPE layout shall be further from the attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How the parts add up.

    Attributes:
        nextn: Of the MTP layer's first step.
        chain: Of each deeper step.
        index: Of the indexers' divergence; it reaches their own weights only.
        layout: Of what makes the indexers depend on the layout of RoPE, see :func:`index_loss`.
        index_rows: Queries a batch that the divergence is measured on.
        chain_steps: Deeper steps.
        chain_rows: Sequences that the chain runs on.
        chain_length: Tokens of each, from its start.
        chain_every: Steps of training from one chain to the next.
        index_every: Steps of training from one index loss to the next.
    """

    nextn: float = 0.3
    chain: float = 0.15
    index: float = 1.0
    layout: float = 0.0
    index_rows: int = 2048
    chain_steps: int = 4
    chain_rows: int = 16
    chain_length: int = 512
    chain_every: int = 1
    index_every: int = 1

    def at(self, step: int) -> LossWeights:
        """What counts in one step of training.

        Args:
            step: Its number.

        Returns:
            The weights, without chain or index loss where it is not their turn.
        """
        return dataclasses.replace(
            self,
            chain_steps=0 if step % self.chain_every else self.chain_steps,
            index=0.0 if step % self.index_every else self.index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Scalars of one batch; ``total`` has the graph."""

    total: torch.Tensor
    token: torch.Tensor
    code_accuracy: torch.Tensor
    nextn: torch.Tensor
    chain: torch.Tensor
    index: torch.Tensor
    layout: torch.Tensor
    loads: dict[int, torch.Tensor]


def token_loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy, and whether each token was the likeliest."""
    logits = logits.float()
    entropy = F.cross_entropy(logits, targets, reduction="none")
    loss = (entropy * weights).sum() / weights.sum().clamp(min=1.0)
    return loss, logits.argmax(-1) == targets


def soft_loss(
    logits: torch.Tensor, target_logits: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy to the target model's own distribution, which the drafts have to guess."""
    wanted = target_logits.detach().float().softmax(-1)
    entropy = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (entropy * weights).sum() / weights.sum().clamp(min=1.0)


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


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Move along axis 1: ``out[:, p] = x[:, p - by]``, zero where there is none."""
    if by < 0:
        return F.pad(x[:, -by:], (0, 0) * (x.ndim - 2) + (0, -by))
    return F.pad(x[:, : x.shape[1] - by], (0, 0) * (x.ndim - 2) + (by, 0))


class Chain:
    """The deeper steps of a round of drafts, for rounds that begin at every position at once.

    In step ``j`` row ``p`` belongs to the round whose first row was ``p - j``. It attends to the
    rows up to that one as the MTP layer computed them from the target's hidden states, and to the
    ``j`` rows after them as the chain itself computed them: just what the server's caches hold.
    """

    def __init__(self, model: Model, trace: LayerTrace, output: torch.Tensor, length: int) -> None:
        """Begin after the first step.

        Args:
            model: The model.
            trace: The MTP layer's first step on these sequences.
            output: ``[sequences, length, hidden]``, after ``shared_head.norm``.
            length: Tokens a sequence.
        """
        self.model = model
        self.sequences = output.shape[0]
        self.length = length
        self.output = output
        self.k, self.v = (part.unflatten(0, (-1, length)) for part in (trace.k, trace.v))
        self.mask = trace.mask
        positions = torch.arange(length, device=output.device).repeat(self.sequences)
        self.table = rope_table(positions, model.spec)
        self.drafted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, next_ids: torch.Tensor) -> torch.Tensor:
        """Run a step.

        Args:
            next_ids: ``[sequences, length]``, the token after each position.

        Returns:
            ``[sequences, length, hidden]``, after ``shared_head.norm``. Rows before the step's
            number mean nothing.
        """
        model, length = self.model, self.length
        spec = model.spec
        depth = len(self.drafted) + 1
        hidden = shift(self.output, 1)
        x = model.nextn_input(hidden.flatten(0, 1), next_ids.flatten())
        q, k, v, _, _ = model.project(spec.num_hidden_layers, x, self.table)
        q, k, v = (part.unflatten(0, (-1, length)) for part in (q, k, v))
        self.drafted.append((k, v))
        position = torch.arange(length, device=x.device)
        unseen = position[None] > position[:, None] - depth
        unseen = unseen | ~shift(self.mask, depth) if self.mask is not None else unseen[None]
        logits = torch.einsum("bqhd,bkhd->bhqk", q, self.k).float()
        logits = logits.masked_fill(unseen[:, None], float("-inf"))
        own, values = [], []
        for number, (drafted_k, drafted_v) in enumerate(self.drafted, start=1):
            own.append((q * shift(drafted_k, depth - number)).sum(-1).float())
            values.append(shift(drafted_v, depth - number))
        logits = torch.cat([logits, torch.stack(own, -1).transpose(1, 2)], -1)
        weights = (logits * spec.qk_head_dim**-0.5).softmax(-1).to(v.dtype)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], self.v)
        for number, value in enumerate(values):
            attended = attended + weights[..., length + number].transpose(1, 2)[..., None] * value
        x, _ = model.tail(spec.num_hidden_layers, x, attended.flatten(0, 1).flatten(1))
        self.output = model.nextn_norm(x).unflatten(0, (-1, length))
        return self.output


def first_sequences(trace: LayerTrace, rows: int, length: int, kept: int) -> LayerTrace:
    """Cut a trace of ``[all, length]`` sequences to the first ``rows``, ``kept`` tokens each."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, length))[:rows, :kept].flatten(0, 1)

    mask = trace.mask
    return LayerTrace(
        q=cut(trace.q),
        k=cut(trace.k),
        v=cut(trace.v),
        normed=cut(trace.normed),
        q_latent=cut(trace.q_latent),
        mask=None if mask is None else mask[:rows, :kept, :kept],
    )


def compute_losses(
    model: Model,
    ids: torch.Tensor,
    stored_weights: torch.Tensor,
    sparse: bool,
    scale: LossWeights,
) -> Losses:
    """Run a batch forward.

    Args:
        model: The model.
        ids: ``[rows, length]``, int64.
        stored_weights: ``[rows, length]``, uint8, see ``sequences``.
        sparse: Whether attention sees selections only.
        scale: Of the parts.

    Returns:
        The losses.
    """
    spec = model.spec
    rows, length = ids.shape
    output: Output = model.forward(ids, sparse=sparse)
    weights = shift(stored_weights.float() / UNIT, -1)  # of the token after each position
    next_ids = shift(ids, -1)
    logits = model.logits(output.hidden)
    token, correct = token_loss(logits, next_ids.flatten(), weights.flatten())
    is_code = shift(stored_weights, -1).flatten() >= CODE_WEIGHT
    accuracy = (correct & is_code).sum() / is_code.sum().clamp(min=1)

    positions = torch.arange(length, device=ids.device).repeat(rows)
    table = rope_table(positions, spec)
    nextn_layer = spec.num_hidden_layers
    x = model.nextn_input(output.hidden, next_ids.flatten())
    x, trace, load = model.layer(nextn_layer, x, table, rows, None, sparse)
    if load is not None:
        output.loads[nextn_layer] = load
    drafted = model.nextn_norm(x)
    wanted = shift(logits.detach().unflatten(0, (rows, length)), -1)
    later_weights = shift(weights, -1)
    nextn = soft_loss(model.logits(drafted), wanted.flatten(0, 1), later_weights.flatten())

    kept, sequences = min(scale.chain_length, length), min(scale.chain_rows, rows)
    chain = torch.zeros((), device=ids.device)
    if scale.chain_steps:
        some = Chain(
            model,
            first_sequences(trace, sequences, length, kept),
            drafted.unflatten(0, (rows, length))[:sequences, :kept],
            kept,
        )
        for step in range(1, scale.chain_steps + 1):
            deeper = some.step(next_ids[:sequences, :kept])
            counted = later_weights[:sequences, :kept].clone()
            counted[:, :step] = 0.0
            counted[:, -2:] = 0.0
            chain = chain + soft_loss(
                model.logits(deeper.flatten(0, 1)),
                wanted[:sequences, :kept].flatten(0, 1),
                counted.flatten(),
            )

    index = layout = torch.zeros((), device=ids.device)
    if scale.index:
        queries = sample_rows(weights, max(2, scale.index_rows // rows // 2 * 2))
        full = [layer for layer in range(nextn_layer) if spec.has_indexer(layer)]
        ends = [*full[1:], nextn_layer]
        groups = {first: output.traces[first:end] for first, end in zip(full, ends)}
        groups[nextn_layer] = [trace]
        for first, group in groups.items():
            own, wrong = index_loss(model, first, group, queries, table, scale.layout > 0)
            index, layout = index + own / len(groups), layout + wrong / len(groups)

    total = token + scale.nextn * nextn + scale.chain * chain
    total = total + scale.index * index + scale.layout * layout
    return Losses(
        total=total,
        token=token.detach(),
        code_accuracy=accuracy,
        nextn=nextn.detach(),
        chain=chain.detach() / max(1, scale.chain_steps),
        index=index.detach(),
        layout=layout.detach(),
        loads={layer: load.detach() for layer, load in output.loads.items()},
    )
