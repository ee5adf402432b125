"""Retrieval: many questions about each of several long contexts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_glm.checkpoint.tiny.notes import Notes, Question, write_crowded_notes, write_notes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer

    from sglang_glm.verification.behaviour.client import Client

ANSWER_TOKENS = 14
"""``The code of NAME is CODE.`` and some room."""

_DEPTHS = 4
_BRANCHES = 12
_TOKENS_A_NAME = 2048
"""Of crowded notes: a name is stated some 150 times, more than twice what can be selected."""


@dataclass(slots=True, kw_only=True)
class Score:
    """Right answers among questions."""

    right: int = 0
    asked: int = 0

    def add(self, right: bool) -> None:
        """Count one answer."""
        self.right += right
        self.asked += 1

    def __add__(self, other: Score) -> Score:
        """Both together."""
        return Score(right=self.right + other.right, asked=self.asked + other.asked)

    @property
    def share(self) -> float:
        """Right answers over all; 1.0 if nothing was asked."""
        return self.right / self.asked if self.asked else 1.0


@dataclass(slots=True, kw_only=True)
class Retrieval:
    """What was found.

    Attributes:
        by_length: Context length to score.
        by_depth: Quarter of the context, 0 first, to score; crowded questions do not count.
        plain: Of names that were stated once.
        several: Of those stated several times.
        crowded: Of those stated more often than can be selected, in contexts of their own.
        cached_share: Share of the prompts' tokens that came from the prefix cache.
        wrong: Some wrong replies: question, expected, got.
    """

    by_length: dict[int, Score] = field(default_factory=lambda: defaultdict(Score))
    by_depth: dict[int, Score] = field(default_factory=lambda: defaultdict(Score))
    plain: Score = field(default_factory=Score)
    several: Score = field(default_factory=Score)
    crowded: Score = field(default_factory=Score)
    cached_share: float = 0.0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def positional(self) -> Score:
        """Questions whose answer only the order of statements tells."""
        return self.several + self.crowded

    @property
    def total(self) -> Score:
        """All questions."""
        return self.plain + self.positional


def choose_questions(notes: Notes, count: int) -> list[int]:
    """Pick questions, half of them positional as far as there are any.

    Args:
        notes: The context.
        count: At most.

    Returns:
        Indices into ``notes.questions``.
    """
    positional = [i for i, question in enumerate(notes.questions) if question.positional]
    plain = [i for i, question in enumerate(notes.questions) if not question.positional]
    half = min(len(positional), count // 2)
    return positional[:half] + plain[: count - half]


@dataclass(slots=True, kw_only=True)
class _Asker:
    """Asks, and remembers what the whole took from the cache."""

    client: Client
    found: Retrieval
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def ask(self, prompts: list[tuple[str, Question]]) -> list[tuple[Question, bool]]:
        answers = self.client.generate([text + q.text for text, q in prompts], ANSWER_TOKENS)
        told = []
        for (_, question), answer in zip(prompts, answers, strict=True):
            right = question.is_answered_by(answer["text"])
            self.prompt_tokens += answer["meta_info"]["prompt_tokens"]
            self.cached_tokens += answer["meta_info"]["cached_tokens"]
            if not right and len(self.found.wrong) < 10:
                self.found.wrong.append((question.text, question.code, answer["text"]))
            told.append((question, right))
        return told


def measure_retrieval(
    client: Client,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    *,
    contexts: int,
    questions: int,
    crowded: int,
    seed: int,
    progress: Callable[[str], None],
) -> Retrieval:
    """Ask.

    Args:
        client: The server.
        tokenizer: The tiny checkpoint's.
        lengths: Tokens of each context.
        contexts: Contexts of each length.
        questions: Asked about each context.
        crowded: Contexts of each length that state few names very often.
        seed: Of the contexts.
        progress: Called with a line after each context.

    Returns:
        The scores.
    """
    found = Retrieval()
    asker = _Asker(client=client, found=found)
    for length in lengths:
        for number in range(contexts):
            notes = write_notes(tokenizer, length, seed * 1000 + number)
            # The context alone first: the questions then find it in the cache.
            client.generate([notes.text], 1)
            chosen = [notes.questions[i] for i in choose_questions(notes, questions)]
            for question, right in asker.ask([(notes.text, question) for question in chosen]):
                found.by_length[length].add(right)
                found.by_depth[min(int(question.depth * _DEPTHS), _DEPTHS - 1)].add(right)
                (found.several if question.positional else found.plain).add(right)
            score = found.by_length[length]
            progress(f"retrieval at {length:,}: {score.right} of {score.asked}")
        for number in range(crowded):
            branches = write_crowded_notes(
                tokenizer,
                length,
                seed * 1000 + number,
                branches=_BRANCHES,
                names=max(1, length // _TOKENS_A_NAME),
            )
            client.generate([branches[0].text], 1)
            asked = [(notes.text, question) for notes in branches for question in notes.questions]
            for _, right in asker.ask(asked):
                found.by_length[length].add(right)
                found.crowded.add(right)
            progress(f"crowded notes: {found.crowded.right} of {found.crowded.asked}")
    found.cached_share = asker.cached_tokens / max(1, asker.prompt_tokens)
    return found
