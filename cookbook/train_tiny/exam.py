"""The questions of ``sglang-glm verify --behaviour``, answered by the trainer's forward.

``python -m cookbook.train_tiny.exam DIRECTORY`` takes seconds on a GPU, without a server, and says
also what servers with a wrong index would answer.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cookbook.train_tiny.indexer import index_inputs, rotate_halves
from cookbook.train_tiny.model import Model
from cookbook.train_tiny.spec import TINY
from cookbook.train_tiny.state import load
from sglang_glm.checkpoint.tiny.notes import Question, write_crowded_notes, write_notes
from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.verification.behaviour.retrieval import choose_questions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MULTIPLE = 128
"""Lengths that the kernel of ``index_scores`` takes."""

Asked = list[tuple[str, str, Question]]
"""Kind, text up to where the answer begins, and the question."""


def questions(tokenizer: Tokenizer, lengths: list[int], contexts: int, seed: int) -> Asked:
    """Draw contexts and what is asked about them.

    Args:
        tokenizer: The tiny checkpoint's.
        lengths: Of contexts.
        contexts: Of each length, and as many crowded ones.
        seed: Of the draw.

    Returns:
        All questions.
    """
    asked: Asked = []
    for length in lengths:
        for number in range(contexts):
            notes = write_notes(tokenizer, length, seed * 1000 + number)
            for i in choose_questions(notes, 50):
                question = notes.questions[i]
                kind = "latest" if question.positional else "once"
                asked.append((f"{kind} {length}", notes.text, question))
            for branch in write_crowded_notes(
                tokenizer, length, seed * 1000 + number, branches=8, names=max(1, length // 2048)
            ):
                asked += [(f"crowded {length}", branch.text, q) for q in branch.questions]
    return asked


@torch.no_grad()
def answer(model: Model, tokenizer: Tokenizer, asked: Asked, device: str) -> dict[str, float]:
    """Let the model tell each code, both words.

    Args:
        model: The model.
        tokenizer: The tiny checkpoint's.
        asked: From :func:`questions`.
        device: Where to compute.

    Returns:
        Kind to share of right answers.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for first in range(0, len(asked), 8):
        some = asked[first : first + 8]
        encoded = []
        for _, text, question in some:
            name = question.text.partition("the code of ")[2].partition("?")[0]
            ids = tokenizer.encode(f"{text}{question.text}The code of {name} is").ids
            encoded.append((ids, tokenizer.encode(f" {question.code}").ids))
        longest = max(len(ids) + len(code) for ids, code in encoded)
        length = -(-longest // _MULTIPLE) * _MULTIPLE
        batch = torch.zeros(len(some), length, dtype=torch.long)
        for row, (ids, code) in enumerate(encoded):
            batch[row, : len(ids) + len(code)] = torch.tensor(ids + code)
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            hidden = model.forward(batch.to(device), sparse=True).hidden
            told = model.logits(hidden).argmax(-1).view(batch.shape).cpu()
        for row, ((kind, _, _), (ids, code)) in enumerate(zip(some, encoded)):
            got = told[row, len(ids) - 1 : len(ids) - 1 + len(code)].tolist()
            right[kind].append(got == code)
    return {kind: sum(answers) / len(answers) for kind, answers in sorted(right.items())}


def main() -> None:
    """Parse the command line, ask, print a line of JSON for each server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="the trainer's --out, or a checkpoint")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(TINY, load(args.state, device))
    tokenizer = build_tokenizer()
    asked = questions(tokenizer, args.lengths, args.contexts, args.seed)
    for name, turn in (("served", {"rounded": True}), ("half-split", {"turn": rotate_halves})):
        began = time.time()
        model.index_inputs = functools.partial(index_inputs, **turn)
        found = answer(model, tokenizer, asked, device)
        print(json.dumps({"index": name, "seconds": round(time.time() - began, 1), **found}))


if __name__ == "__main__":
    main()
