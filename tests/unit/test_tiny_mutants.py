"""The trained checkpoint answers from its index: break the index and it forgets.

In process, on the trainer's forward, which ``test_train_tiny.py`` ties to transformers'. Each mutant
is a fault that a serving path can have.

| mutant | codes right |
| --- | --- |
| none | at least 95% |
| keys never written | below 50% |
| keys of neighbouring pages exchanged | below 50% |
| no RoPE; RoPE on the trailing half; on queries only | below 50% |
| queries half-split, keys interleaved | below 50% |
| key positions counted anew in every chunk of 512 | below 50% |

One fault is not seen here: both queries and keys in the half-split layout. Selection by content and
nearness survives it; see cookbook/train_tiny/README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from cookbook.train_tiny import model as trained
from cookbook.train_tiny.sequences import CODE_WEIGHT, SequenceWriter
from cookbook.train_tiny.spec import TINY
from cookbook.train_tiny.train import load
from tests.support.tiny import CHECKPOINT, needs_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_checkpoint

LENGTH, PAGE, CHUNK = 2048, 64, 512
ROPE = TINY.qk_rope_head_dim
IndexParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
original = trained.index_inputs


def half_split(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = table[:, None, 0], table[:, None, 1]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def with_positions(positions: torch.Tensor, args: tuple[Any, ...]) -> IndexParts:
    """Queries and keys as if tokens stood at other positions."""
    parameters, layer, normed, q_latent, _, spec = args
    table = trained.rope_table(positions, spec)
    return original(parameters, layer, normed, q_latent, table, spec)


def unrotated(args: tuple[Any, ...]) -> IndexParts:
    """Queries and keys without RoPE, their pairs neighbours again."""

    def pair(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :ROPE].chunk(2, -1)
        return torch.cat([torch.stack([first, second], -1).flatten(-2), x[..., ROPE:]], -1)

    q, k, weights = with_positions(torch.zeros(len(args[2])), args)
    return pair(q), pair(k), weights


def dropped(*args: Any) -> IndexParts:
    q, k, weights = original(*args)
    return q, torch.zeros_like(k), weights


def swapped_pages(*args: Any) -> IndexParts:
    q, k, weights = original(*args)
    pages = k.unflatten(0, (-1, PAGE))
    return q, pages[torch.arange(len(pages)) ^ 1].flatten(0, 1), weights


def no_rope(*args: Any) -> IndexParts:
    return unrotated(args)


def trailing_rope(*args: Any) -> IndexParts:
    q, k, weights = unrotated(args)
    table = args[4]
    q = torch.cat([q[..., :-ROPE], trained.rotate(q[..., -ROPE:], table)], -1)
    k = torch.cat([k[..., :-ROPE], trained.rotate(k[:, None, -ROPE:], table)[:, 0]], -1)
    return q, k, weights


def rope_on_queries_only(*args: Any) -> IndexParts:
    q, _, weights = original(*args)
    return q, with_positions(torch.zeros(len(args[2])), args)[1], weights


def two_layouts(*args: Any) -> IndexParts:
    _, k, weights = original(*args)
    q = unrotated(args)[0]
    return torch.cat([half_split(q[..., :ROPE], args[4]), q[..., ROPE:]], -1), k, weights


def chunk_positions(*args: Any) -> IndexParts:
    q, _, weights = original(*args)
    return q, with_positions(torch.arange(len(args[2])) % CHUNK, args)[1], weights


@pytest.fixture(scope="module")
def right_codes() -> Callable[[object], float]:
    model = trained.Model(TINY, load(CHECKPOINT, "cpu"))
    ids, weights = SequenceWriter(424_242).document(LENGTH, (0.4, 0.4))
    tokens = torch.tensor([ids])
    marked = torch.tensor(weights)[1:] >= CODE_WEIGHT
    assert marked.sum() >= 40

    @torch.no_grad()
    def measure(index_inputs: object) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trained, "index_inputs", index_inputs)
            told = model.logits(model.forward(tokens, sparse=True).hidden).argmax(-1)
        right = told[:-1] == tokens[0, 1:]
        return right[marked].float().mean().item()

    return measure


def test_codes_are_right(right_codes: Callable[[object], float]) -> None:
    assert right_codes(original) >= 0.95


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
def test_a_broken_index_is_seen(mutant: object, right_codes: Callable[[object], float]) -> None:
    assert right_codes(mutant) < 0.5
