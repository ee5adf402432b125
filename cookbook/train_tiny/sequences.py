"""Training sequences: retrieval, copies and small talk, as token ids with a weight for each.

A weight says how much predicting that token counts. Names and codes are drawn at random, so where
they first appear they cannot be predicted and count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cookbook.train_tiny.notes import NotesWriter, Piece
from sglang_glm.checkpoint.tiny.dialogues import small_talk
from sglang_glm.checkpoint.tiny.words import vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = 16
"""Weights are stored as bytes; this one means 1.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What a batch consists of.

    Attributes:
        length: Tokens a sequence.
        rows: Sequences a batch.
        retrieval: Share of sequences that are documents with questions.
        copying: Share that are random words said twice; the rest is small talk.
        questions: Bounds of the part of a document's sequence that holds questions.
        crowded: Share of documents that state few names again and again, see
            :meth:`~cookbook.train_tiny.notes.NotesWriter.crowd`.
    """

    length: int
    rows: int
    retrieval: float
    copying: float
    questions: tuple[float, float]
    crowded: float = 0.0


class SequenceWriter(NotesWriter):
    """Draws sequences of every kind."""

    def __init__(self, seed: int) -> None:
        """Prepare the fixed pieces.

        Args:
            seed: Of everything drawn.
        """
        super().__init__(seed)
        self.words = [self.encode(word)[0] for word in vocabulary()]

    def copy(self, length: int) -> Piece:
        """Write random words and the same words again, until the sequence is full."""
        rng = self.rng
        ids: list[int] = list(self.encode("[gMASK]<sop><|user|>"))
        weights = [2] * len(ids)
        between, after = self.encode("<|assistant|></think>"), self.encode("<|user|>")
        while len(ids) < length:
            words = rng.choices(self.words, k=rng.randint(5, min(length // 2, 200)))
            ids += [*words, *between, *words, *after]
            weights += [0] * len(words) + [8] * len(between) + [12] * len(words) + [8] * len(after)
        return ids[:length], weights[:length]

    def talk(self, length: int) -> Piece:
        """Write conversations, one after the other, until the sequence is full."""
        rng = self.rng
        ids: list[int] = []
        weights: list[int] = []
        user, assistant = self.encode("<|user|>"), self.encode("<|assistant|>")
        while len(ids) < length:
            start = self.encode("[gMASK]<sop><|user|>")
            ids += start
            weights += [4] * len(start)
            thinking = rng.choice((0.0, 0.5, 1.0))
            for _ in range(rng.randint(1, 8)):
                question, reasoning, answer = small_talk(rng)
                asked = self.encode(question)
                block = f"<think>{reasoning}</think>" if rng.random() < thinking else "</think>"
                said = [*self.encode(block), *self.encode(answer), *user]
                ids += [*asked, *assistant, *said]
                weights += [4] * (len(asked) + 1) + [UNIT] * len(said)
        return ids[:length], weights[:length]

    def batch(self, mix: Mix) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a batch.

        Args:
            mix: What it consists of.

        Returns:
            Token ids, ``[rows, length]`` int16, and weights, the same in uint8. The first rows are
            small talk, then copies, then documents.
        """
        copies, documents = round(mix.rows * mix.copying), round(mix.rows * mix.retrieval)
        ids = np.empty((mix.rows, mix.length), dtype=np.int16)
        weights = np.empty((mix.rows, mix.length), dtype=np.uint8)
        for row in range(mix.rows):
            if row < mix.rows - copies - documents:
                piece = self.talk(mix.length)
            elif row < mix.rows - documents:
                piece = self.copy(mix.length)
            else:
                piece = (
                    self.crowd(mix.length)
                    if self.rng.random() < mix.crowded
                    else self.document(mix.length, mix.questions)
                )
            ids[row], weights[row] = piece
        return torch.from_numpy(ids), torch.from_numpy(weights)


class Batches(IterableDataset):
    """An endless stream of batches, a different one in every worker."""

    def __init__(self, mix: Mix, seed: int) -> None:
        """Describe the stream.

        Args:
            mix: What each batch consists of.
            seed: Of the stream.
        """
        self.mix = mix
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches for ever."""
        info = get_worker_info()
        writer = SequenceWriter(self.seed * 1000 + (info.id if info else 0))
        while True:
            yield writer.batch(self.mix)


def batches(mix: Mix, seed: int, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Start processes that draw batches.

    Args:
        mix: What each batch consists of.
        seed: Of the stream.
        workers: Processes; with 0 they are drawn when asked for.

    Returns:
        Batches for ever.
    """
    loader = DataLoader(
        Batches(mix, seed),
        batch_size=None,
        num_workers=workers,
        pin_memory=workers > 0 and torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
        multiprocessing_context="spawn" if workers else None,
    )
    return iter(loader)
