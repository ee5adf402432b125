"""The trained checkpoint answers from its index: break the index and it forgets.

In process, on the trainer's forward, which ``test_train_tiny.py`` ties to transformers'.

| mutant | bound |
| --- | --- |
| none | at least 98% of the codes |
| index keys that were not written | below 50% |
| index keys of pages read in another order | below 50% |
| index RoPE in the half-split layout | 30 points less on names stated several times |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cookbook.train_tiny import model as trained
from cookbook.train_tiny.sequences import CODE_WEIGHT, LATEST_WEIGHT, SequenceWriter
from cookbook.train_tiny.spec import TINY
from cookbook.train_tiny.train import load
from tests.support.tiny import CHECKPOINT, needs_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_checkpoint

LENGTH, PAGE = 2048, 64
IndexParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
original = trained.index_inputs


def dropped(*args: object) -> IndexParts:
    q, k, weights = original(*args)
    return q, torch.zeros_like(k), weights


def swapped(*args: object) -> IndexParts:
    q, k, weights = original(*args)
    pages = k.unflatten(0, (-1, PAGE))
    return q, pages[torch.arange(len(pages)) ^ 1].flatten(0, 1), weights


def half_split(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = table[:, None, 0], table[:, None, 1]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def wrong_rope(*args: object) -> IndexParts:
    right = trained.rotate
    trained.rotate = half_split
    try:
        return original(*args)
    finally:
        trained.rotate = right


@pytest.fixture(scope="module")
def accuracy() -> Callable[[object], dict[str, float]]:
    model = trained.Model(TINY, load(CHECKPOINT, "cpu"))
    writer = SequenceWriter(424_242)
    rows = [writer.document(LENGTH, (0.3, 0.3)) for _ in range(3)]
    ids = torch.tensor([row[0] for row in rows])
    marks = torch.tensor([row[1] for row in rows])[:, 1:]

    @torch.no_grad()
    def measure(index_inputs: object) -> dict[str, float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trained, "index_inputs", index_inputs)
            told = torch.cat(
                [
                    model.logits(model.forward(row[None], sparse=True).hidden).argmax(-1)[None]
                    for row in ids
                ]
            )
        right = told[:, :-1] == ids[:, 1:]
        return {
            "all": right[marks >= CODE_WEIGHT].float().mean().item(),
            "latest": right[marks == LATEST_WEIGHT].float().mean().item(),
        }

    return measure


def test_a_broken_index_is_seen_in_the_answers(
    accuracy: Callable[[object], dict[str, float]],
) -> None:
    right = accuracy(original)
    assert right["all"] >= 0.98
    assert accuracy(dropped)["all"] < 0.5
    assert accuracy(swapped)["all"] < 0.5
    assert accuracy(wrong_rope)["latest"] < right["latest"] - 0.3
