"""What is minimised: the next token, the MTP chain, and the indexers' distance to attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.chain import Chain, first_sequences, shift
from cookbook.train_tiny.index_loss import index_loss, sample_rows
from cookbook.train_tiny.layers import rope_table
from cookbook.train_tiny.notes import CODE_WEIGHT
from cookbook.train_tiny.sequences import UNIT

if TYPE_CHECKING:
    from cookbook.train_tiny.model import Model, Output


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How the parts add up.

    Attributes:
        nextn: Of the MTP layer's first step.
        chain: Of each deeper step.
        index: Of the indexers' divergence; it reaches their own weights only.
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

    index = torch.zeros((), device=ids.device)
    if scale.index:
        queries = sample_rows(weights, max(2, scale.index_rows // rows // 2 * 2))
        full = [layer for layer in range(nextn_layer) if spec.has_indexer(layer)]
        ends = [*full[1:], nextn_layer]
        groups = {first: output.traces[first:end] for first, end in zip(full, ends)}
        groups[nextn_layer] = [trace]
        for first, group in groups.items():
            index = index + index_loss(model, first, group, queries, table) / len(groups)

    total = token + scale.nextn * nextn + scale.chain * chain + scale.index * index
    return Losses(
        total=total,
        token=token.detach(),
        code_accuracy=accuracy,
        nextn=nextn.detach(),
        chain=chain.detach() / max(1, scale.chain_steps),
        index=index.detach(),
        loads={layer: load.detach() for layer, load in output.loads.items()},
    )
