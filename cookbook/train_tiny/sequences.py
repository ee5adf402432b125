"""Training sequences: retrieval, copies and small talk, as token ids with a weight for each.

A weight says how much predicting that token counts. Names and codes are drawn at random, so where
they first appear they cannot be predicted and count nothing.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from sglang_glm.checkpoint.tiny.dialogues import filler, small_talk
from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.checkpoint.tiny.words import (
    CODE_FIRST,
    CODE_SECOND,
    NAME_FIRST,
    NAME_SECOND,
    vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = 16
"""Weights are stored as bytes; this one means 1.0."""

CODE_WEIGHT = 32
"""Marks a token of a retrieved code."""

LATEST_WEIGHT = 33
"""Marks a token of a code whose name was stated several times: the latest counts."""

_POOL_SENTENCES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What a batch consists of.

    Attributes:
        length: Tokens a sequence.
        rows: Sequences a batch.
        retrieval: Share of sequences that are documents with questions.
        copying: Share that are random words said twice; the rest is small talk.
        questions: Bounds of the part of a document's sequence that holds questions.
        often: Share of documents that state a few names very often, more often than the selection
            has room for; only an index that knows positions keeps the latest.
    """

    length: int
    rows: int
    retrieval: float
    copying: float
    questions: tuple[float, float]
    often: float = 0.2


Piece = tuple[list[int], list[int]]
"""Token ids and as many weights."""


class SequenceWriter:
    """Draws sequences from one seed."""

    def __init__(self, seed: int) -> None:
        """Prepare the fixed pieces.

        Args:
            seed: Of everything drawn.
        """
        self.rng = Random(seed)
        self.tokenizer = build_tokenizer()
        self.encode = functools.lru_cache(maxsize=200_000)(
            lambda text: self.tokenizer.encode(text).ids
        )
        self.names = [
            [*self.encode(f" {first}"), *self.encode(f" {second}")]
            for first, second in itertools.product(NAME_FIRST, NAME_SECOND)
        ]
        self.codes = [
            [*self.encode(f" {first}"), *self.encode(f" {second}")]
            for first, second in itertools.product(CODE_FIRST, CODE_SECOND)
        ]
        self.words = [self.encode(word)[0] for word in vocabulary()]
        sentences = [self.encode(filler(self.rng) + "\n") for _ in range(_POOL_SENTENCES)]
        self.fillers: list[Piece] = [(ids, [4] * len(ids)) for ids in sentences]

    def statement(self, name: int, code: int) -> Piece:
        """Write ``The code of NAME is CODE.`` as a line of a document."""
        head, middle, end = (self.encode(text) for text in ("The code of", " is", ".\n"))
        ids = [*head, *self.names[name], *middle, *self.codes[code], *end]
        weights = [4, 4, 4, 0, 0, 4, 0, 0, *[4] * len(end)]
        return ids, weights

    def question(self, name: int, code: int, weight: int) -> Piece:
        """Write a question and its answer, up to the ``<|user|>`` that ends it."""
        rng = self.rng
        if rng.random() < 0.7:
            before, after = self.encode("What is the code of"), self.encode("?<|assistant|>")
        else:
            before, after = self.encode("Please tell me the code of"), self.encode(".<|assistant|>")
        ids = [*before, *self.names[name], *after]
        weights = [2] * len(before) + [0, 0] + [2] * len(after)
        if rng.random() < 0.15:
            opening = [*self.encode("<think>I look for"), *self.names[name]]
            opening += self.encode(".</think>")
        else:
            opening = self.encode("</think>")
        answer = [*opening, *self.encode("The code of"), *self.names[name], *self.encode(" is")]
        end = self.encode(".<|user|>")
        ids += [*answer, *self.codes[code], *end]
        weights += [8] * len(answer) + [weight, weight] + [8] * len(end)
        return ids, weights

    def document(self, length: int, questions: tuple[float, float], often: bool = False) -> Piece:
        """Write notes and questions about them.

        Args:
            length: Tokens wanted; the sequence is cut there.
            questions: Bounds of the share of the sequence that holds questions.
            often: Whether to state few names very often, see :class:`Mix`.

        Returns:
            The sequence.
        """
        rng = self.rng
        part = rng.uniform(*questions)
        statements = rng.choice((1.0, rng.uniform(0.1, 1.0), rng.uniform(0.03, 0.4)))
        again = rng.choice((0.0, 0.15, 0.3, 0.5))
        sessions = rng.choice((1, 1, 1, 2, 3))
        if often:
            statements = rng.uniform(0.6, 1.0)
            again = rng.choice((0.95, 0.98, 0.995))
            sessions = min(rng.choice((1, 2, 4, 8, 16)), length // 128)
        order = rng.sample(range(len(self.names)), min(len(self.names), length // 4))
        stated: dict[int, int] = {}
        times: dict[int, int] = {}
        ids: list[int] = list(self.encode("[gMASK]<sop><|user|>"))
        weights: list[int] = [4] * len(ids)

        def add(piece: Piece) -> None:
            ids.extend(piece[0])
            weights.extend(piece[1])

        opening = self.encode("Remember these notes.\n")
        closing = self.encode("<|assistant|></think>Noted.<|user|>")
        for session in range(1, sessions + 1):
            add((opening, [4] * len(opening)))
            notes_end = int(length * (session - part) / sessions)
            while True:
                if not stated or rng.random() < statements:
                    if stated and (rng.random() < again or not order):
                        name = rng.choice(list(stated)[-200:])
                    else:
                        name = order.pop()
                    stated[name] = rng.randrange(len(self.codes))
                    times[name] = times.get(name, 0) + 1
                    add(self.statement(name, stated[name]))
                else:
                    add(rng.choice(self.fillers))
                if len(ids) >= notes_end:
                    break
            add((closing, [8] * len(closing)))
            waiting: list[int] = []
            session_end = length * session / sessions
            while len(ids) < session_end:
                if not waiting:
                    waiting = rng.sample(list(stated), len(stated))
                name = waiting.pop()
                weight = CODE_WEIGHT if times[name] == 1 else LATEST_WEIGHT
                add(self.question(name, stated[name], weight))
        return ids[:length], weights[:length]

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
                often = self.rng.random() < mix.often
                piece = self.document(mix.length, mix.questions, often)
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
