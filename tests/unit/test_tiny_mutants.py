"""The trained checkpoint answers from its index: break the index and it forgets.

In process, on the trainer's forward, which ``test_train_tiny.py`` ties to transformers'. Each mutant
is a fault that a serving path can have.

| mutant | codes right |
| --- | --- |
| none | at least 95%, and as much where only the index's sense of position tells |
| keys never written | below 50% |
| keys of neighbouring pages exchanged | below 50% |
| no RoPE; RoPE on the trailing half; on queries only | below 50% |
| queries half-split, keys interleaved | below 50% |
| key positions counted anew in every chunk of 512 | below 50% |
| queries and keys half-split | positional codes: at least 30 points fewer |
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cookbook.train_tiny.indexer import IndexParts, index_inputs, rotate_halves
from cookbook.train_tiny.layers import rope_table, rotate
from cookbook.train_tiny.model import Model
from cookbook.train_tiny.notes import CODE_WEIGHT, CROWDED_WEIGHT, LATEST_WEIGHT
from cookbook.train_tiny.sequences import SequenceWriter
from cookbook.train_tiny.spec import TINY
from cookbook.train_tiny.state import load
from tests.support.tiny import CHECKPOINT, needs_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_checkpoint

LENGTH, PAGE, CHUNK = 2048, 64, 512
ROPE = TINY.qk_rope_head_dim


def with_positions(positions: torch.Tensor, args: tuple[Any, ...]) -> IndexParts:
    """Queries and keys as if tokens stood at other positions."""
    parameters, layer, normed, q_latent, _, spec = args
    return index_inputs(parameters, layer, normed, q_latent, rope_table(positions, spec), spec)


def unrotated(args: tuple[Any, ...]) -> IndexParts:
    """Queries and keys without RoPE, their pairs neighbours again."""

    def pair(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :ROPE].chunk(2, -1)
        return torch.cat([torch.stack([first, second], -1).flatten(-2), x[..., ROPE:]], -1)

    q, k, weights = with_positions(torch.zeros(len(args[2])), args)
    return pair(q), pair(k), weights


def dropped(*args: Any) -> IndexParts:
    q, k, weights = index_inputs(*args)
    return q, torch.zeros_like(k), weights


def swapped_pages(*args: Any) -> IndexParts:
    q, k, weights = index_inputs(*args)
    pages = k.unflatten(0, (-1, PAGE))
    return q, pages[torch.arange(len(pages)) ^ 1].flatten(0, 1), weights


def no_rope(*args: Any) -> IndexParts:
    return unrotated(args)


def trailing_rope(*args: Any) -> IndexParts:
    q, k, weights = unrotated(args)
    table = args[4]
    q = torch.cat([q[..., :-ROPE], rotate(q[..., -ROPE:], table)], -1)
    k = torch.cat([k[..., :-ROPE], rotate(k[:, None, -ROPE:], table)[:, 0]], -1)
    return q, k, weights


def rope_on_queries_only(*args: Any) -> IndexParts:
    q, _, weights = index_inputs(*args)
    return q, with_positions(torch.zeros(len(args[2])), args)[1], weights


def two_layouts(*args: Any) -> IndexParts:
    _, k, weights = index_inputs(*args)
    q = unrotated(args)[0]
    return torch.cat([rotate_halves(q[..., :ROPE], args[4]), q[..., ROPE:]], -1), k, weights


def chunk_positions(*args: Any) -> IndexParts:
    q, _, weights = index_inputs(*args)
    return q, with_positions(torch.arange(len(args[2])) % CHUNK, args)[1], weights


half_split = functools.partial(index_inputs, turn=rotate_halves)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, load(CHECKPOINT, "cpu"))


@torch.no_grad()
def right_codes(
    model: Model,
    texts: list[tuple[list[int], list[int]]],
    inputs: Callable[..., IndexParts],
    *,
    at_least: int = CODE_WEIGHT,
) -> float:
    """Share of the codes' tokens that are told right, of codes whose mark is high enough."""
    tokens, marks = (torch.tensor(parts) for parts in zip(*texts, strict=True))
    model.index_inputs = inputs
    told = model.logits(model.forward(tokens, sparse=True).hidden).argmax(-1).view(tokens.shape)
    right = told[:, :-1] == tokens[:, 1:]
    return right[marks[:, 1:] >= at_least].float().mean().item()


@pytest.fixture(scope="module")
def notes() -> list[tuple[list[int], list[int]]]:
    """A document of many names."""
    ids, marks = SequenceWriter(424_242).document(LENGTH, (0.4, 0.4))
    assert sum(mark >= CODE_WEIGHT for mark in marks) >= 40
    return [(ids, marks)]


@pytest.fixture(scope="module")
def crowds() -> list[tuple[list[int], list[int]]]:
    """Documents that state a name more often than can be selected; many questions about it."""
    writer = SequenceWriter(424_243)
    drawn = [writer.crowd(LENGTH) for _ in range(200)]
    best = sorted(drawn, key=lambda text: text[1].count(CROWDED_WEIGHT))[-3:]
    assert all(marks.count(CROWDED_WEIGHT) >= 12 for _, marks in best)
    return best


def test_codes_are_right(model: Model, notes: list, crowds: list) -> None:
    assert right_codes(model, notes, index_inputs) >= 0.95
    assert right_codes(model, crowds, index_inputs, at_least=CROWDED_WEIGHT) >= 0.95


@pytest.mark.parametrize(
    "mutant",
    [
        dropped,
        swapped_pages,
        no_rope,
        trailing_rope,
        rope_on_queries_only,
        two_layouts,
        chunk_positions,
    ],
)
def test_a_broken_index_is_seen(mutant: Callable, model: Model, notes: list) -> None:
    assert right_codes(model, notes, mutant) < 0.5


def test_the_wrong_layout_is_seen(model: Model, notes: list, crowds: list) -> None:
    """Both halves of the score in the other layout: content still matches, positions do not."""
    texts, half_split = [*notes, *crowds], functools.partial(index_inputs, turn=rotate_halves)
    right = right_codes(model, texts, index_inputs, at_least=LATEST_WEIGHT)
    assert right_codes(model, texts, half_split, at_least=LATEST_WEIGHT) <= right - 0.3
