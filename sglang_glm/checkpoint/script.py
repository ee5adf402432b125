"""A target that says a given text, so that a chat's path can be tested to the last character.

The text is said wherever the template opens an answer, with reasoning or without. A second text, if
given, is said instead after a tool's response, with reasoning only: the head adds up what three
tokens say, and cannot tell all four cases apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.tokenizer import STOP_TOKENS, token_id
from sglang_glm.checkpoint.trigram import CODE_WIDTH

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sglang_glm.checkpoint.spec import CheckpointSpec

_OTHER = CODE_WIDTH - 1
"""Code of every token that no script contains."""
_LOGIT = 24.0
"""Of the scripted token where the equations have an exact solution; other tokens then have 0."""
_START = 3 * _LOGIT
"""The same for a script's first token, which must win whatever the prompt's last token adds."""
_MARGIN = 12.0
"""Least lead of the scripted token: sampling at temperature 1 strays once in 100,000 tokens."""

Context = tuple[int, int, int | None]
"""Current, previous and oldest token; None where any token may stand."""


def script_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a script and end it.

    Args:
        tokenizer: The checkpoint's.
        text: In the template's format, reasoning first: ``why</think>answer``.

    Returns:
        Token ids ending in a stop token; ``<|user|>`` is added where the text has none.

    Raises:
        ValueError: If the text is empty or does not close its reasoning.
    """
    if "</think>" not in text:
        raise ValueError(
            f"checkpoint: script is {text!r}, expected reasoning, </think>, and the answer"
        )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    stop = [token_id(tokenizer, token) for token in STOP_TOKENS]
    return ids if ids[-1] in stop else [*ids, token_id(tokenizer, "<|user|>")]


def _lines(tokenizer: Tokenizer, spec: CheckpointSpec) -> dict[Context, int]:
    # Context to next token, for every point of every script.
    assistant = token_id(tokenizer, "<|assistant|>")
    think, end_think = (token_id(tokenizer, token) for token in ("<think>", "</think>"))
    after_tool = token_id(tokenizer, "</tool_response>")
    nexts: dict[Context, int] = {}
    for number, text in enumerate(spec.script):
        start = after_tool if number else None
        tokens = script_tokens(tokenizer, text)
        starts = [([think], tokens)]
        if number == 0:
            # With reasoning switched off the prompt closes it, and the answer follows at once.
            starts.append(([end_think], tokens[tokens.index(end_think) + 1 :]))
        for said, rest in starts:
            history: list[int | None] = [start, assistant, *said, *rest]
            for at in range(2, len(history) - 1):
                oldest, previous, current, following = history[at - 2 : at + 2]
                assert previous is not None and current is not None and following is not None
                known = nexts.setdefault((current, previous, oldest), following)
                if known != following:
                    words = tokenizer.decode(
                        [t for t in (oldest, previous, current) if t is not None]
                    )
                    raise ValueError(
                        f"checkpoint: script continues {words!r} in two ways; the model sees "
                        "three tokens, so reword one of the two places"
                    )
    return nexts


def script_target(tokenizer: Tokenizer, spec: CheckpointSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Make codes and tables that follow the script.

    Args:
        tokenizer: The checkpoint's.
        spec: With ``script`` set.

    Returns:
        ``codes_of_tokens`` and ``tables`` for ``TrigramBuilder.target``.

    Raises:
        ValueError: If the script has too many different tokens or cannot be told apart by three.
    """
    nexts = _lines(tokenizer, spec)
    used = sorted({t for context in nexts for t in context if t is not None} | set(nexts.values()))
    if len(used) > _OTHER:
        raise ValueError(
            f"checkpoint: script has {len(used)} different tokens, expected at most {_OTHER}"
        )
    codes_of_tokens = torch.full((spec.vocab_size,), _OTHER)
    codes_of_tokens[used] = torch.arange(len(used))

    # One equation per context and scripted token: the codes' entries add up to a logit for the
    # token that follows and to 0 for the others. Where any oldest token may stand, the other two
    # carry the sum; a script for one particular oldest token outbids that.
    design = torch.zeros(len(nexts), 3, CODE_WIDTH, dtype=torch.float64)
    wanted = torch.zeros(len(nexts), len(used), dtype=torch.float64)
    for row, (context, following) in enumerate(nexts.items()):
        for part, token in enumerate(context):
            if token is not None:
                design[row, part, codes_of_tokens[token]] = 1.0
        otherwise = nexts.get((context[0], context[1], None))
        if otherwise is None:
            wanted[row, codes_of_tokens[following]] = _LOGIT
        else:
            wanted[row, codes_of_tokens[otherwise]] = _START
            if context[2] is not None:
                wanted[row, codes_of_tokens[following]] = 2 * _START
    solution = torch.linalg.lstsq(design.flatten(1), wanted, driver="gelsd").solution
    solution = solution.view(3, CODE_WIDTH, len(used))
    _check_margins(nexts, codes_of_tokens, solution)
    tables = torch.zeros(3, spec.vocab_size, CODE_WIDTH)
    tables[:, used] = solution.transpose(1, 2).float()
    return codes_of_tokens, tables


def _check_margins(
    nexts: dict[Context, int], codes_of_tokens: torch.Tensor, solution: torch.Tensor
) -> None:
    # Tokens that begin another script: a free oldest token is any but these.
    named = [z for x, y, z in nexts if z is not None and (x, y, None) in nexts]
    anything = torch.arange(CODE_WIDTH)
    anything = anything[~torch.isin(anything, codes_of_tokens[named])]
    for (current, previous, oldest), following in nexts.items():
        pair = solution[0, codes_of_tokens[current]] + solution[1, codes_of_tokens[previous]]
        codes = anything if oldest is None else codes_of_tokens[oldest].view(1)
        logits = pair + solution[2, codes]  # [oldest codes, used tokens]
        right = int(codes_of_tokens[following])
        others = logits.clone()
        others[:, right] = float("-inf")
        margin = float((logits[:, right] - others.amax(1)).min())
        if margin < _MARGIN:
            raise ValueError(
                f"checkpoint: script cannot be followed by three tokens at a time (a lead of "
                f"{margin:.1f}, expected {_MARGIN:.0f}); shorten it or repeat fewer words"
            )
