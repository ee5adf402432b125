"""Notes that state codes among filler, and questions about them: the retrieval task as text."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.tiny.dialogues import filler
from sglang_glm.checkpoint.tiny.words import CODE_FIRST, CODE_SECOND, NAME_FIRST, NAME_SECOND

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OPENING = "[gMASK]<sop><|user|>Remember these notes.\n"
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


def write_notes(
    tokenizer: Tokenizer, length: int, seed: int, *, density: float = 0.4, again: float = 0.25
) -> Notes:
    """Write notes of a given length.

    Args:
        tokenizer: The tiny checkpoint's.
        length: Tokens; the notes end with the first line that reaches it.
        seed: Of everything drawn.
        density: Share of lines that state a code; the others are filler.
        again: Share of statements that give a new code to a name stated before.

    Returns:
        The notes, with one question for each name.
    """
    rng = Random(f"notes:{seed}")
    names = [f"{first} {second}" for first in NAME_FIRST for second in NAME_SECOND]
    rng.shuffle(names)
    lines: list[str] = []
    stated: dict[str, tuple[str, int, int]] = {}  # name -> code, line, statements
    used = len(tokenizer.encode(OPENING + CLOSING).ids)
    while used < length:
        if not stated or rng.random() < density:
            name = (
                rng.choice(list(stated)) if stated and rng.random() < again else names[len(stated)]
            )
            code = f"{rng.choice(CODE_FIRST)} {rng.choice(CODE_SECOND)}"
            stated[name] = (code, len(lines), stated.get(name, ("", 0, 0))[2] + 1)
            lines.append(f"The code of {name} is {code}.\n")
        else:
            lines.append(filler(rng) + "\n")
        used += len(tokenizer.encode(lines[-1]).ids)
    questions = [
        Question(
            text=f"<|user|>What is the code of {name}?<|assistant|></think>",
            code=code,
            depth=line / len(lines),
            statements=statements,
        )
        for name, (code, line, statements) in stated.items()
    ]
    rng.shuffle(questions)
    return Notes(text=OPENING + "".join(lines) + CLOSING, questions=tuple(questions))
