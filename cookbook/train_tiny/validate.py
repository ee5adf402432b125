"""What the trainer measures while it trains: retrieval by context, drafts, perplexity."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cookbook.train_tiny.chain import Chain, first_sequences, shift
from cookbook.train_tiny.indexer import index_inputs, rotate_halves
from cookbook.train_tiny.layers import rope_table
from cookbook.train_tiny.notes import CODE_WEIGHT, CROWDED_WEIGHT, LATEST_WEIGHT
from cookbook.train_tiny.sequences import UNIT, Mix, SequenceWriter

if TYPE_CHECKING:
    from cookbook.train_tiny.model import Model

_CROWDED_FROM = 2048
"""Shorter contexts have no room for a crowd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Sequences that no training seed draws.

    Attributes:
        documents: Length to ids and weights, each ``[rows, length]``.
        crowded: The same of documents that state few names again and again.
        talk: Ids and weights of small talk.
    """

    documents: dict[int, tuple[torch.Tensor, torch.Tensor]]
    crowded: dict[int, tuple[torch.Tensor, torch.Tensor]]
    talk: tuple[torch.Tensor, torch.Tensor]


def held_out(lengths: list[int], tokens: int, device: str, seed: int = 999_983) -> HeldOut:
    """Draw validation sequences.

    Args:
        lengths: Of documents.
        tokens: Of each length, about.
        device: Where they live.
        seed: Of the draw.

    Returns:
        The sequences; an eighth of each document is questions.
    """
    writer = SequenceWriter(seed)

    def draw(length: int, crowded: float) -> tuple[torch.Tensor, torch.Tensor]:
        part = max(0.125, 96 / length)
        mix = Mix(
            length=length,
            rows=max(2, tokens // length),
            retrieval=1.0,
            copying=0.0,
            questions=(part, part),
            crowded=crowded,
        )
        return _to(writer.batch(mix), device)

    documents = {length: draw(length, 0.0) for length in lengths}
    crowded = {length: draw(length, 1.0) for length in lengths if length >= _CROWDED_FROM}
    length = 384
    mix = Mix(
        length=length,
        rows=max(4, tokens // length // 2),
        retrieval=0.0,
        copying=0.0,
        questions=(0, 0),
    )
    return HeldOut(documents=documents, crowded=crowded, talk=_to(writer.batch(mix), device))


def _to(batch: tuple[torch.Tensor, torch.Tensor], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].to(device).long(), batch[1].to(device)


@torch.no_grad()
def validate(model: Model, data: HeldOut, sparse: bool) -> dict[str, float]:
    """Measure.

    Args:
        model: The model.
        data: From :func:`held_out`.
        sparse: Whether attention sees selections only.

    Returns:
        What :func:`retrieval` gives; ``accept``, tokens a round of five drafts; ``draft_{i}``, the
        share of rounds in which draft ``i`` and all before it were right; ``perplexity`` of
        answers.
    """
    return retrieval(model, data, sparse=sparse) | _talk(model, *data.talk, sparse=sparse)


@torch.no_grad()
def validate_wrong_layout(model: Model, data: HeldOut) -> dict[str, float]:
    """As :func:`retrieval`, of a server whose indexers turn half-split pairs."""
    right = model.index_inputs
    model.index_inputs = functools.partial(index_inputs, turn=rotate_halves)
    try:
        return retrieval(model, data, sparse=True)
    finally:
        model.index_inputs = right


def retrieval(model: Model, data: HeldOut, *, sparse: bool) -> dict[str, float]:
    """Measure how many codes are told right, both words.

    Args:
        model: The model.
        data: From :func:`held_out`.
        sparse: Whether attention sees selections only.

    Returns:
        ``code_{length}``, ``latest_{length}`` and ``crowded_{length}``: of names stated once,
        several times, more often than can be selected.
    """
    found: dict[str, float] = {}
    kinds = (("code", CODE_WEIGHT), ("latest", LATEST_WEIGHT), ("crowded", CROWDED_WEIGHT))
    for documents in (data.documents, data.crowded):
        for length, (ids, weights) in documents.items():
            whole, kind = _codes(model, ids, weights, sparse=sparse)
            for name, mark in kinds:
                where = kind == mark
                crowd = name == "crowded"
                if where.any() and crowd == (documents is data.crowded):
                    share = (whole & where).sum().item() / where.sum().item()
                    found[f"{name}_{length}"] = share
    return found


def _codes(
    model: Model, ids: torch.Tensor, weights: torch.Tensor, *, sparse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where both words of a code were told right, and the mark of codes that begin, else 0."""
    told = [
        model.logits(model.forward(some, sparse=sparse).hidden).argmax(-1).view(some.shape)
        for some in ids.split(4)
    ]
    right = torch.cat(told)[:, :-1] == ids[:, 1:]
    kind = weights[:, 1:]
    # Both words of a code carry its mark; only whole codes inside the sequence count.
    first = (kind[:, :-1] >= CODE_WEIGHT) & (kind[:, 1:] >= CODE_WEIGHT)
    return right[:, :-1] & right[:, 1:], kind[:, :-1] * first


def _talk(
    model: Model, ids: torch.Tensor, weights: torch.Tensor, *, sparse: bool, steps: int = 5
) -> dict[str, float]:
    rows, length = ids.shape
    output = model.forward(ids, sparse=sparse)
    logits = model.logits(output.hidden).float().unflatten(0, (rows, length))
    next_ids = shift(ids, -1)
    answer = shift(weights, -1) >= UNIT
    entropy = -logits.log_softmax(-1).gather(-1, next_ids[..., None])[..., 0]
    told = logits.argmax(-1)
    sure = (told == next_ids) & answer

    positions = torch.arange(length, device=ids.device).repeat(rows)
    table = rope_table(positions, model.spec)
    x = model.nextn_input(output.hidden, next_ids.flatten())
    x, trace, _ = model.layer(model.spec.num_hidden_layers, x, table, rows, None, sparse)
    hidden = model.nextn_norm(x)
    chain = Chain(
        model,
        first_sequences(trace, rows, length, length),
        hidden.unflatten(0, (rows, length)),
        length,
    )
    # Row p of step j holds the round that began at row p - j; rounds count whose text is the
    # target's own for as long as they last, so that what is drafted can be compared with it.
    drafts = model.logits(hidden).argmax(-1).view(rows, length)
    alive = shift(sure, -1)
    counted = sure & alive
    for ahead in range(2, steps + 1):
        counted &= shift(sure, -ahead)
    counted[:, -steps - 2 :] = False
    kept = counted.clone()
    found: dict[str, float] = {}
    total = max(1, int(counted.sum()))
    accept = 1.0
    for step in range(steps):
        right = drafts == shift(told, -1)
        kept = kept & shift(right, -step)
        share = kept.sum().item() / total
        found[f"draft_{step + 1}"] = share
        accept += share
        if step + 1 < steps:
            drafts = model.logits(chain.step(shift(drafts, 1)).flatten(0, 1))
            drafts = drafts.argmax(-1).view(rows, length)
    return found | {
        "accept": accept,
        "perplexity": entropy[answer].mean().exp().item(),
        "answer_accuracy": sure.sum().item() / max(1, int(answer.sum())),
    }
