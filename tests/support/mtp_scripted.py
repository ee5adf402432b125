"""Drafts by script: which are right is decided by the tokens, and every text has a definition.

The checkpoint of `--mtp-perfect attention`, whose target reads the last three tokens, two of them
through its cache, and whose MTP layer would always be right. Here the MTP layer takes chosen tokens
for others, so the draft after such a token is wrong and every other draft is right.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import torch

from sglang_glm.checkpoint.perfect_mtp import LIVE_TOKENS, digit_tables
from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.trigram import CODE_WIDTH, CURRENT, hadamard_codes
from tests.support.checkpoints import checkpoint
from tests.support.mtp_checkpoints import rewrite

if TYPE_CHECKING:
    from tests.support.mtp_checkpoints import Tensors

#: Which drafts are wrong: none, those after some tokens, or all.
Script = Literal["right", "mixed", "wrong"]

#: The draft after one of these is wrong.
MISREAD: dict[Script, frozenset[int]] = {
    "right": frozenset(),
    "mixed": frozenset(range(0, LIVE_TOKENS, 5)),
    "wrong": frozenset(range(LIVE_TOKENS)),
}


@functools.cache
def scripted(script: Script, index_topk: int) -> str:
    """A checkpoint whose drafts are wrong as `script` says, of the shapes of `aligned(index_topk)`."""
    source = checkpoint("--mtp", "--mtp-perfect", "attention", "--index-topk", str(index_topk))

    def change(tensors: Tensors, config: dict) -> None:
        project = tensors[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"]
        # Codes are orthogonal, so that one matrix exchanges them as it likes.
        codes = hadamard_codes()
        read_as = codes[[_read_as(token, script) for token in range(LIVE_TOKENS)]]
        exchange = read_as.T @ codes / CODE_WIDTH
        project[CURRENT, CURRENT] = (exchange @ project[CURRENT, CURRENT].float()).bfloat16()

    return rewrite(source, f"scripted-{index_topk}-{script}", change)


def _read_as(token: int, script: Script) -> int:
    """The token that the MTP layer takes `token` for: one that another token follows."""
    if token not in MISREAD[script]:
        return token
    follows = _tables()[0]
    return next(t for t in range(LIVE_TOKENS) if (follows[:, t] != follows[:, token]).any())


@functools.cache
def _tables() -> torch.Tensor:
    return digit_tables(CheckpointSpec(num_nextn_predict_layers=1, mtp_perfect="attention"))


def walk(prompt: list[int], count: int) -> list[int]:
    """What the target says after `prompt`, at least three tokens, from its definition."""
    tokens = list(prompt)
    for _ in range(count):
        recent = [token % LIVE_TOKENS for token in tokens[-1:-4:-1]]
        votes = torch.stack([_tables()[part, :, code] for part, code in enumerate(recent)])
        tokens.append(int(votes.sum(0).argmax()))
    return tokens[len(prompt) :]


def accepts(prompt: list[int], count: int, steps: int, script: Script) -> list[int]:
    """Drafts accepted in each round until `count` tokens are there.

    Args:
        prompt: At least three tokens.
        count: Tokens wanted; the last round may go beyond.
        steps: Drafts a round.
        script: Which drafts are wrong.
    """
    tokens = [*prompt, *walk(prompt, count + steps + 1)]
    last, rounds = len(prompt), []
    while last + 1 - len(prompt) < count:
        wrong = (
            step for step in range(steps) if tokens[last + step] % LIVE_TOKENS in MISREAD[script]
        )
        rounds.append(next(wrong, steps))
        last += rounds[-1] + 1
    return rounds
