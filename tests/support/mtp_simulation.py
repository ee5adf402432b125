"""EAGLE rounds as this package defines them, on transformers' modules.

As `sglang_glm.verification.draft.decode_with_drafts`, but for `index_share_for_mtp_iteration`: there
the round's selection stays as it is; here the positions drafted so far join it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_glm.verification.draft import Draft, DraftedText, decode_with_drafts
from sglang_glm.verification.oracle import Oracle


def simulate(model: str, prompt: list[int], count: int, steps: int, *, share: bool) -> DraftedText:
    """Greedy text of one request, and the drafts accepted in each round.

    Args:
        model: Checkpoint with an MTP layer.
        prompt: Its tokens.
        count: Tokens to generate; the last round may add a few.
        steps: Draft steps a round.
        share: Whether draft steps reuse the selection of the last verified token.
    """
    oracle = Oracle(Path(model))
    if not share:
        return decode_with_drafts(oracle, prompt, count, steps=steps)
    run = oracle.greedy(prompt, count + steps + 1)
    text, hidden = run.token_ids, run.final_hidden
    draft, topk = Draft(oracle), oracle.config.index_topk
    length, accepted = len(prompt), []
    rows = draft.extend(text[1 : length + 1], hidden[:length])
    while length + 1 - len(prompt) < count:
        drafts, state = [int(rows.logits[-1].argmax())], rows.hidden[-1:]
        ranked = rows.selection[-1]
        for step in range(1, steps):
            selection = None
            # A selection of everything ranks nothing: the first rows beyond it choose anew.
            if length > topk:
                drafted = torch.arange(length, length + step, dtype=ranked.dtype)
                selection = torch.cat([ranked[: topk - step], drafted])
            rows = draft.extend(drafts[-1:], state, selection)
            drafts.append(int(rows.logits[-1].argmax()))
            state = rows.hidden
        draft.truncate(length)
        follow = text[length + 1 : length + 1 + steps].tolist()
        correct = next((i for i in range(steps) if drafts[i] != follow[i]), steps)
        accepted.append(correct)
        new_length = length + correct + 1
        rows = draft.extend(text[length + 1 : new_length + 1], hidden[length:new_length])
        length = new_length
    return DraftedText(token_ids=text[len(prompt) : length + 1].tolist(), accepted=accepted)
