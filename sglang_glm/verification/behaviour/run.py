"""Runs the whole evaluation and judges it."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.verification.behaviour.client import Client
from sglang_glm.verification.behaviour.retrieval import Retrieval, measure_retrieval
from sglang_glm.verification.behaviour.talk import (
    Drafts,
    measure_drafts,
    measure_perplexity,
    write_conversations,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourReport:
    """What a server did.

    Attributes:
        retrieval: See ``retrieval``.
        cold: Replies and drafts with an empty cache.
        hit: The same requests again, their prompts cached.
        perplexity: Of held-out replies.
        seconds: That the evaluation took.
        failures: Sentences, one for each bound that was missed; empty if all is well.
    """

    retrieval: Retrieval
    cold: Drafts
    hit: Drafts
    perplexity: float
    seconds: float
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every bound was met."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        retrieval = self.retrieval
        return {
            "passed": self.passed,
            "failures": list(self.failures),
            "retrieval": retrieval.total.share,
            "questions": retrieval.total.asked,
            "retrieval_by_length": {n: s.share for n, s in retrieval.by_length.items()},
            "retrieval_by_quarter": {n: s.share for n, s in sorted(retrieval.by_depth.items())},
            "plain": retrieval.plain.share,
            "positional": retrieval.positional.share,
            "several": retrieval.several.share,
            "crowded": retrieval.crowded.share,
            "cached_share": retrieval.cached_share,
            "drafts_cold": dataclasses.asdict(self.cold),
            "drafts_hit": dataclasses.asdict(self.hit),
            "perplexity": self.perplexity,
            "seconds": self.seconds,
        }

    def render(self) -> str:
        """Write the report as text."""
        retrieval = self.retrieval
        lines = [
            "retrieval by context: "
            + ", ".join(
                f"{length:,}: {score.share:.1%} of {score.asked}"
                for length, score in retrieval.by_length.items()
            ),
            "retrieval by quarter of the context: "
            + ", ".join(f"{score.share:.1%}" for _, score in sorted(retrieval.by_depth.items())),
            "by how often the name is stated: "
            + ", ".join(
                f"{name}: {score.share:.1%} of {score.asked}"
                for name, score in (
                    ("once", retrieval.plain),
                    ("several times", retrieval.several),
                    ("more often than can be selected", retrieval.crowded),
                )
                if score.asked
            ),
            f"prompt tokens from the cache: {retrieval.cached_share:.1%}",
            f"replies right: {self.cold.right_replies:.1%} cold, {self.hit.right_replies:.1%} cached",
            f"perplexity of replies: {self.perplexity:.3f}",
        ]
        if self.cold.rounds:
            positions = ", ".join(f"{share:.2f}" for share in self.cold.by_position)
            lines.append(
                f"accept length: {self.cold.accept_length:.2f} cold, "
                f"{self.hit.accept_length:.2f} cached; by draft position: {positions}"
            )
        else:
            lines.append("accept length: the server drafts nothing")
        lines += [f"FAILED: {failure}" for failure in self.failures]
        lines += [
            f"  asked {question!r}, expected {code!r}, got {reply!r}"
            for question, code, reply in retrieval.wrong[:3]
        ]
        lines.append(f"{'passed' if self.passed else 'failed'} in {self.seconds:.0f} s")
        return "\n".join(lines)


def configure_behaviour(parser: argparse.ArgumentParser) -> None:
    """Add the evaluation's options.

    Args:
        parser: Of the command that calls :func:`run_behaviour` with the parsed arguments.
    """
    group = parser.add_argument_group("behaviour of the trained tiny checkpoint")
    group.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096], help="tokens of the contexts"
    )
    group.add_argument("--contexts", type=int, default=3, help="contexts of each length")
    group.add_argument("--questions", type=int, default=50, help="asked about each context")
    group.add_argument(
        "--crowded",
        type=int,
        default=1,
        help="contexts of each length that state few names very often",
    )
    group.add_argument("--conversations", type=int, default=24, help="whose reply is written")
    group.add_argument("--behaviour-seed", type=int, default=1, help="of contexts and talk")
    group.add_argument("--min-retrieval", type=float, default=0.98, help="share that must be right")
    group.add_argument(
        "--min-accept", type=float, default=3.0, help="tokens a round, if the server drafts"
    )


def behaviour_options(**changes: object) -> argparse.Namespace:
    """Give the options' defaults.

    Args:
        changes: Options that differ, by attribute name.

    Returns:
        What parsing an empty command line gives, with the changes.
    """
    parser = argparse.ArgumentParser()
    configure_behaviour(parser)
    options = parser.parse_args([])
    for name, value in changes.items():
        if not hasattr(options, name):
            raise ValueError(
                f"behaviour_options: got {name!r}, expected one of {sorted(vars(options))}"
            )
        setattr(options, name, value)
    return options


def run_behaviour(
    base_url: str,
    options: argparse.Namespace | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> BehaviourReport:
    """Evaluate a server of the trained tiny checkpoint.

    Args:
        base_url: Such as ``http://127.0.0.1:30000``.
        options: As parsed with :func:`configure_behaviour`; the defaults if None.
        progress: Called with a line now and then.

    Returns:
        The report; ``failures`` says what missed its bound.

    Raises:
        RuntimeError: If the server refuses a request.
    """
    options = options or behaviour_options()
    started = time.monotonic()
    client, tokenizer = Client(base_url), build_tokenizer()
    conversations = write_conversations(options.conversations, options.behaviour_seed)
    client.flush_cache()
    cold = measure_drafts(client, conversations)
    progress(f"replies: {cold.right_replies:.1%} right, accept length {cold.accept_length:.2f}")
    hit = measure_drafts(client, conversations)
    perplexity = measure_perplexity(client, tokenizer, conversations)
    progress(f"perplexity: {perplexity:.3f}")
    retrieval = measure_retrieval(
        client,
        tokenizer,
        options.lengths,
        contexts=options.contexts,
        questions=options.questions,
        crowded=options.crowded,
        seed=options.behaviour_seed,
        progress=progress,
    )
    failures = []
    for length, score in retrieval.by_length.items():
        if score.share < options.min_retrieval:
            failures.append(
                f"retrieval at {length:,} is {score.share:.1%}, "
                f"expected at least {options.min_retrieval:.1%}"
            )
    if cold.rounds:
        if cold.accept_length < options.min_accept:
            failures.append(
                f"accept length is {cold.accept_length:.2f}, expected at least {options.min_accept}"
            )
        if hit.accept_length < 0.95 * cold.accept_length:
            failures.append(
                f"accept length after prefix hits is {hit.accept_length:.2f}, "
                f"expected at least 95% of {cold.accept_length:.2f}"
            )
    return BehaviourReport(
        retrieval=retrieval,
        cold=cold,
        hit=hit,
        perplexity=perplexity,
        seconds=time.monotonic() - started,
        failures=tuple(failures),
    )
