"""Notes that state codes among filler, and questions about them: the retrieval task as text."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.tiny.dialogues import filler
from sglang_glm.checkpoint.tiny.words import CODE_FIRST, CODE_SECOND, NAME_FIRST, NAME_SECOND

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OPENING_AGAIN = "<|user|>Remember these notes.\n"
OPENING = f"[gMASK]<sop>{OPENING_AGAIN}"
CLOSING = "<|assistant|></think>Noted."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about notes.

    Attributes:
        text: What follows the notes, up to where the answer begins.
        code: The right answer: the code stated last.
        depth: Where that statement stands in the notes, 0 at the start to 1 at the end.
        statements: How often the name is stated; above one the latest counts.
    """

    text: str
    code: str
    depth: float
    statements: int

    @property
    def positional(self) -> bool:
        """Whether only the order of statements tells the right one."""
        return self.statements > 1

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply names the code, and no other before it.

        Args:
            reply: Generated text.

        Returns:
            True for ``The code of NAME is CODE.`` with the right code.
        """
        return reply.partition(" is ")[2].startswith(f"{self.code}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """A context and what can be asked about it.

    Attributes:
        text: The conversation so far, up to ``Noted.``
        questions: In random order.
    """

    text: str
    questions: tuple[Question, ...]


class NotesWriter:
    """Writes notes session by session."""

    def __init__(self, tokenizer: Tokenizer, seed: str, *, density: float, again: float) -> None:
        """Begin empty.

        Args:
            tokenizer: The tiny checkpoint's.
            seed: Of everything drawn.
            density: Share of lines that state a code; the others are filler.
            again: Share of statements that give a new code to a name stated before.
        """
        self.tokenizer = tokenizer
        self.rng = Random(seed)
        self.density, self.again = density, again
        self.names = [f"{first} {second}" for first in NAME_FIRST for second in NAME_SECOND]
        self.rng.shuffle(self.names)
        self.text = ""
        self.tokens = self.lines = 0
        self.stated: dict[str, tuple[str, int, int]] = {}
        """Name to code, line and how often."""

    def branch(self, seed: str) -> NotesWriter:
        """Copy what is written, to go on with other draws."""
        other = copy.copy(self)
        other.rng, other.stated = Random(seed), dict(self.stated)
        return other

    def _write(self, text: str) -> None:
        self.text += text
        self.tokens += len(self.tokenizer.encode(text).ids)

    def session(self, tokens: int) -> None:
        """Add a session of notes and its acknowledgement.

        Args:
            tokens: The whole text's length; the session ends with the first line that reaches it.
        """
        rng = self.rng
        self._write(OPENING if not self.text else OPENING_AGAIN)
        room = len(self.tokenizer.encode(CLOSING).ids)
        while self.tokens + room < tokens:
            if not self.stated or rng.random() < self.density:
                if self.stated and rng.random() < self.again:
                    name = rng.choice(list(self.stated))
                else:
                    name = self.names[len(self.stated)]
                code = f"{rng.choice(CODE_FIRST)} {rng.choice(CODE_SECOND)}"
                times = self.stated.get(name, ("", 0, 0))[2] + 1
                self.stated[name] = (code, self.lines, times)
                self._write(f"The code of {name} is {code}.\n")
            else:
                self._write(filler(rng) + "\n")
            self.lines += 1
        self._write(CLOSING)

    def notes(self) -> Notes:
        """Give what is written, with one question for each name."""
        questions = [
            Question(
                text=f"<|user|>What is the code of {name}?<|assistant|></think>",
                code=code,
                depth=line / self.lines,
                statements=statements,
            )
            for name, (code, line, statements) in self.stated.items()
        ]
        self.rng.shuffle(questions)
        return Notes(text=self.text, questions=tuple(questions))


def write_notes(
    tokenizer: Tokenizer, length: int, seed: int, *, density: float = 0.4, again: float = 0.25
) -> Notes:
    """Write notes of a given length.

    Args:
        tokenizer: The tiny checkpoint's.
        length: Tokens; the notes end with the first line that reaches it.
        seed: Of everything drawn.
        density: See :class:`NotesWriter`.
        again: The same.

    Returns:
        The notes, with one question for each name.
    """
    writer = NotesWriter(tokenizer, f"notes:{seed}", density=density, again=again)
    writer.session(length)
    return writer.notes()


def write_crowded_notes(
    tokenizer: Tokenizer, length: int, seed: int, *, branches: int, names: int
) -> list[Notes]:
    """Write notes that state few names more often than a selection of 64 has room for.

    Content finds all statements of a name alike: position alone tells, in the index already, which
    are worth one of the 64 places.

    Args:
        tokenizer: The tiny checkpoint's.
        length: Tokens of the part that all branches share.
        seed: Of everything drawn.
        branches: Continuations, each of some ten lines.
        names: Stated in turn at random.

    Returns:
        One a branch; they begin with the same text.
    """
    trunk = NotesWriter(tokenizer, f"crowded:{seed}", density=1.0, again=1.0)
    trunk.stated = dict.fromkeys(trunk.names[:names], ("", 0, 0))
    trunk.session(length)
    written = []
    for number in range(branches):
        branch = trunk.branch(f"crowded:{seed}:{number}")
        branch.density = 0.3
        branch.session(trunk.tokens + 120)
        written.append(branch.notes())
    return written
