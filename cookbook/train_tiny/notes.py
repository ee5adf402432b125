"""Training sequences of retrieval: notes that state codes, and questions about them."""

from __future__ import annotations

import functools
import itertools
import math
from random import Random

from sglang_glm.checkpoint.tiny.dialogues import filler
from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.checkpoint.tiny.words import (
    CODE_FIRST,
    CODE_SECOND,
    NAME_FIRST,
    NAME_SECOND,
)

CODE_WEIGHT = 32
"""Marks a token of a retrieved code."""

LATEST_WEIGHT = 33
"""Marks a token of a code whose name was stated several times: the latest counts."""

CROWDED_WEIGHT = 34
"""The same where it was stated ``CROWD`` times or more, and again since it was last asked for."""

CROWD = 70
"""Statements of a name among which a selection of 64 has to leave some out."""

_POOL_SENTENCES = 20_000

Piece = tuple[list[int], list[int]]
"""Token ids and as many weights."""


class NotesWriter:
    """Draws documents from one seed."""

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

    def document(self, length: int, questions: tuple[float, float]) -> Piece:
        """Write notes about many names, and questions.

        Args:
            length: Tokens wanted; the sequence is cut there.
            questions: Bounds of the share of the sequence that holds questions.

        Returns:
            The sequence.
        """
        rng = self.rng
        part = rng.uniform(*questions)
        statements = rng.choice((1.0, rng.uniform(0.1, 1.0), rng.uniform(0.03, 0.4)))
        again = rng.choice((0.0, 0.15, 0.3, 0.5))
        sessions = rng.choice((1, 1, 1, 2, 3))
        order = rng.sample(range(len(self.names)), min(len(self.names), length // 4))
        pages = _Document(self)
        for session in range(1, sessions + 1):
            pages.open()
            notes_end = int(length * (session - part) / sessions)
            while True:
                if not pages.stated or rng.random() < statements:
                    if pages.stated and (rng.random() < again or not order):
                        pages.state(rng.choice(list(pages.stated)[-200:]))
                    else:
                        pages.state(order.pop())
                else:
                    pages.add(rng.choice(self.fillers))
                if len(pages.ids) >= notes_end:
                    break
            pages.close()
            waiting: list[int] = []
            session_end = length * session / sessions
            while len(pages.ids) < session_end:
                if not waiting:
                    waiting = rng.sample(list(pages.stated), len(pages.stated))
                pages.ask(waiting.pop())
        return pages.ids[:length], pages.weights[:length]

    def crowd(self, length: int) -> Piece:
        """Write few names again and again, session after session, and questions in between.

        Names come to be stated more often than the selection has room for: content alone cannot
        choose, and only an index that knows positions keeps the latest.

        Args:
            length: Tokens wanted; the sequence is cut there.

        Returns:
            The sequence.
        """
        rng = self.rng
        few = rng.sample(range(len(self.names)), rng.choice((1, 1, 1, 2, 2, 3, 3, 5)))
        others = [name for name in rng.sample(range(len(self.names)), 200) if name not in few]
        statements = rng.choice((1.0, 1.0, rng.uniform(0.5, 1.0)))
        other = rng.choice((0.0, 0.0, 0.1, 0.3))
        silence = rng.choice((0.0, 0.0, 0.2, 0.5))
        pages = _Document(self)
        begins_long = rng.random() < 0.75
        while len(pages.ids) < length:
            if begins_long and not pages.stated:
                notes = int(length * rng.uniform(0.4, 0.75))
            else:
                notes = int(math.exp(rng.uniform(math.log(30), math.log(length / 10))))
            pages.open()
            end = len(pages.ids) + notes
            # The last statement may be far from the questions.
            last = end - rng.random() * silence * notes
            told: list[int] = []
            while len(pages.ids) < end:
                if len(pages.ids) < last and (not told or rng.random() < statements):
                    is_other = others and rng.random() < other
                    told.append(others.pop() if is_other else rng.choice(few))
                    pages.state(told[-1])
                else:
                    pages.add(rng.choice(self.fillers))
            pages.close()
            if rng.random() < 0.15:
                continue
            waiting = list(dict.fromkeys([*few, *told]))
            for name in rng.sample(waiting, min(len(waiting), rng.randint(1, 8))):
                if name in pages.stated:
                    pages.ask(name)
        return pages.ids[:length], pages.weights[:length]


class _Document:
    """A sequence that grows, and what it has stated so far."""

    def __init__(self, writer: NotesWriter) -> None:
        self.writer = writer
        self.ids: list[int] = list(writer.encode("[gMASK]<sop><|user|>"))
        self.weights: list[int] = [4] * len(self.ids)
        self.stated: dict[int, int] = {}
        self.times: dict[int, int] = {}
        self.asked: set[int] = set()
        """Names not stated again since they were asked for: the answer stands near."""

    def add(self, piece: Piece) -> None:
        self.ids += piece[0]
        self.weights += piece[1]

    def open(self) -> None:
        opening = self.writer.encode("Remember these notes.\n")
        self.add((opening, [4] * len(opening)))

    def close(self) -> None:
        closing = self.writer.encode("<|assistant|></think>Noted.<|user|>")
        self.add((closing, [8] * len(closing)))

    def state(self, name: int) -> None:
        code = self.writer.rng.randrange(len(self.writer.codes))
        self.stated[name] = code
        self.times[name] = self.times.get(name, 0) + 1
        self.asked.discard(name)
        self.add(self.writer.statement(name, code))

    def ask(self, name: int) -> None:
        weight = CODE_WEIGHT if self.times[name] == 1 else LATEST_WEIGHT
        if self.times[name] >= CROWD and name not in self.asked:
            weight = CROWDED_WEIGHT
        self.asked.add(name)
        self.add(self.writer.question(name, self.stated[name], weight))
