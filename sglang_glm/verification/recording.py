"""Makes golden entries, from transformers or from a server that is known to be right."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING

import torch

from sglang_glm.verification.compare import parse_generate
from sglang_glm.verification.decided import decided_prompt
from sglang_glm.verification.golden import (
    GoldenEntry,
    identify,
    make_entry,
)
from sglang_glm.verification.prompts import random_prompt
from sglang_glm.verification.regression import live_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sglang_glm.verification.client import ServerClient, ServerFacts
    from sglang_glm.verification.oracle import Oracle

    Progress = Callable[[int, int], None]
    Named = list[tuple[str, GoldenEntry]]

NEW_TOKENS = 16


def default_lengths(checkpoint: Path, longest: int) -> list[int]:
    """Prompt lengths for a checkpoint.

    Args:
        checkpoint: Its ``config.json`` gives ``index_topk``.
        longest: Largest length allowed.

    Returns:
        Ascending lengths; see ``regression.live_lengths``.
    """
    index_topk = json.loads((checkpoint / "config.json").read_text())["index_topk"]
    return live_lengths(index_topk, min(longest, 3 * index_topk))


def record_oracle(
    oracle: Oracle,
    lengths: Sequence[int],
    *,
    vocab: int,
    progress: Progress | None = None,
) -> Named:
    """Run transformers on decided prompts.

    Args:
        oracle: The reference.
        lengths: Of the prompts.
        vocab: Prompt tokens are drawn from ``[0, vocab)``.
        progress: Called with prompts done and to do.

    Returns:
        Name and entry of every length that has a decided prompt.
    """
    entries: Named = []
    identity = identify(oracle.directory)
    for done, length in enumerate(lengths):
        if progress is not None:
            progress(done, len(lengths))
        prompt = decided_prompt(oracle, vocab, length)
        if prompt is None:
            continue
        entry = make_entry(
            identity.spec,
            identity.weights_sha256,
            oracle.formats,
            oracle.greedy(prompt, NEW_TOKENS),
            prompt_length=length,
        )
        entries.append((f"len{length}", entry))
    return entries


def record_server(
    client: ServerClient,
    facts: ServerFacts,
    checkpoint: Path,
    lengths: Sequence[int],
    *,
    vocab: int,
    progress: Progress | None = None,
) -> Named:
    """Keep what a server says.

    Args:
        client: The server.
        facts: From the client.
        checkpoint: What it serves, on this machine.
        lengths: Of the prompts.
        vocab: Prompt tokens are drawn from ``[0, vocab)``.
        progress: Called with prompts done and to do.

    Returns:
        Name and entry of each length. No position of such an entry is excused later: a server does
        not say where its selections were decided by rounding.
    """
    entries: Named = []
    identity = identify(checkpoint)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    for done, length in enumerate(lengths):
        if progress is not None:
            progress(done, len(lengths))
        prompt = random_prompt(vocab, length, 0)
        answer = client.generate(prompt, NEW_TOKENS)
        got = parse_generate(answer["meta_info"], prompt_length=length)
        entry = GoldenEntry(
            spec=identity.spec,
            weights_sha256=identity.weights_sha256,
            formats=facts.formats,
            versions={**versions, "sglang": str(facts.info["version"])},
            prompt_length=length,
            token_ids=torch.tensor([*prompt, *answer["output_ids"]], dtype=torch.int64),
            rows=got.rows,
            token_logprobs=got.token_logprobs,
            top_ids=got.top_ids.to(torch.int32),
            top_logprobs=got.top_logprobs,
            first_near_tie=None,
        )
        entries.append((f"len{length}", entry))
    return entries
