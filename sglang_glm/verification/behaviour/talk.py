"""Small talk: replies, drafts accepted while they are written, and perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from sglang_glm.checkpoint.tiny.dialogues import Turn, render, small_talk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from sglang_glm.verification.behaviour.client import Client

REPLY_TOKENS = 96
_EARLIER_TURNS = 5
"""Enough for a prompt to fill more than one page of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation that no training seed draws.

    Attributes:
        prompt: Earlier turns and a question, up to where the reply begins.
        reply: What the templates answer.
    """

    prompt: str
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts accepted.

    Attributes:
        accept_length: Tokens a verify round, the sampled one included; 0 without drafts.
        by_position: Share of the rounds in which draft 1, 2, ... was accepted.
        rounds: Verify rounds.
        right_replies: Share of the replies that say what the templates say.
        cached_tokens: Tokens of the prompts that came from the prefix cache.
    """

    accept_length: float
    by_position: tuple[float, ...]
    rounds: int
    right_replies: float
    cached_tokens: int


def write_conversations(count: int, seed: int) -> list[Conversation]:
    """Draw conversations.

    Args:
        count: How many.
        seed: Of the draw.

    Returns:
        Conversations without reasoning, so that greedy text has one right continuation.
    """
    rng = Random(f"conversations:{seed}")
    conversations = []
    for _ in range(count):
        turns: list[Turn] = [small_talk(rng) for _ in range(_EARLIER_TURNS + 1)]
        text = render(turns, rng, thinking=0.0)
        reply = turns[-1][2]
        prompt = text.removesuffix(f"{reply}<|user|>")
        conversations.append(Conversation(prompt=prompt, reply=reply))
    return conversations


def measure_drafts(client: Client, conversations: Sequence[Conversation]) -> Drafts:
    """Let the server reply.

    Args:
        client: The server, with drafts or without.
        conversations: From :func:`write_conversations`.

    Returns:
        What was accepted.
    """
    answers = client.generate([each.prompt for each in conversations], REPLY_TOKENS)
    right = sum(
        answer["text"].strip() == each.reply
        for answer, each in zip(answers, conversations, strict=True)
    )
    accept_length, by_position, rounds = accepted([answer["meta_info"] for answer in answers])
    return Drafts(
        accept_length=accept_length,
        by_position=by_position,
        rounds=rounds,
        right_replies=right / len(conversations),
        cached_tokens=sum(answer["meta_info"]["cached_tokens"] for answer in answers),
    )


def accepted(infos: Sequence[dict[str, Any]]) -> tuple[float, tuple[float, ...], int]:
    """Sum up the histograms of drafts accepted a round.

    Args:
        infos: ``meta_info`` of answers.

    Returns:
        Tokens a round, the share of rounds that accepted each draft position, and the rounds.
    """
    histogram: list[int] = []
    for info in infos:
        counts = info.get("spec_correct_drafts_histogram") or []
        histogram += [0] * (len(counts) - len(histogram))
        for drafts, rounds in enumerate(counts):
            histogram[drafts] += rounds
    rounds = sum(histogram)
    if not rounds:
        return 0.0, (), 0
    tokens = sum((drafts + 1) * count for drafts, count in enumerate(histogram))
    shares = tuple(sum(histogram[i:]) / rounds for i in range(1, len(histogram)))
    return tokens / rounds, shares, rounds


def measure_perplexity(
    client: Client, tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> float:
    """Perplexity of the templates' replies.

    Args:
        client: The server.
        tokenizer: The tiny checkpoint's.
        conversations: From :func:`write_conversations`.

    Returns:
        Per token, given everything before.
    """
    prompts = [tokenizer.encode(each.prompt).ids for each in conversations]
    whole = [
        prompt + tokenizer.encode(f"{each.reply}<|user|>").ids
        for prompt, each in zip(prompts, conversations, strict=True)
    ]
    # The log-probability of a token stands at its own position; one earlier start is harmless.
    answers = client.generate(
        whole,
        1,
        return_logprob=True,
        logprob_start_len=[len(prompt) - 1 for prompt in prompts],
    )
    total, count = 0.0, 0
    for prompt, ids, answer in zip(prompts, whole, answers, strict=True):
        logprobs = answer["meta_info"]["input_token_logprobs"][-(len(ids) - len(prompt)) :]
        total += sum(entry[0] for entry in logprobs)
        count += len(logprobs)
    return math.exp(-total / count)
