"""A served checkpoint against reference log-probabilities: golden entries, or transformers now."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_glm.verification.compare import (
    Comparison,
    ServerLogprobs,
    compare_logprobs,
    parse_generate,
)
from sglang_glm.verification.decided import decided_prompt
from sglang_glm.verification.golden import Identity, compare_golden
from sglang_glm.verification.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sglang_glm.verification.client import ServerClient, ServerFacts
    from sglang_glm.verification.golden import GoldenEntry
    from sglang_glm.verification.layers import LayerReport

    Progress = Callable[[int, int], None]

NEW_TOKENS = 8
"""Tokens decoded after each live prompt."""

FP32_BOUND = 1e-5
FP8_CACHE_BOUND = 2e-3
"""FP32 arithmetic over FP8 caches: a value on the edge of two codes moves one key."""
BF16_RATIO = 1.5
"""Allowed mean error of a BF16 server, in units of transformers' own in BF16."""
MAX_EXCUSED_FRACTION = 0.02


def default_bound(facts: ServerFacts) -> float | None:
    """Largest allowed difference of a log-probability.

    Args:
        facts: What the server computes with.

    Returns:
        The bound, or None for a BF16 server: its error is a distribution, which a live run judges
        beside transformers' own and a golden file cannot.
    """
    if facts.dtype != "float32":
        return None
    narrow = "fp8" in (facts.formats.latent, facts.formats.index_key)
    return FP8_CACHE_BOUND if narrow else FP32_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcome:
    """One prompt.

    Attributes:
        name: Of the golden file, or the length of a live prompt.
        prompt_tokens: Its length.
        compared: Log-probabilities compared.
        excused: Log-probabilities at or after a proven near-tie.
        max_diff: Largest ``|log p - reference|`` of the compared ones.
        first_position: First position whose token's log-probability, or whose token, differs by
            more than the bound allows; None if none does.
        failures: One sentence per broken limit.
        mean_diff: Mean over the compared entries' own tokens.
        yardstick_mean_diff: The same for transformers in BF16; None for an FP32 server.
    """

    name: str
    prompt_tokens: int
    compared: int
    excused: int
    max_diff: float
    first_position: int | None
    failures: list[str]
    mean_diff: float = 0.0
    yardstick_mean_diff: float | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that a verification found.

    Attributes:
        url: The server.
        model: Its checkpoint.
        dtype: Its arithmetic.
        caches: Formats of its caches.
        reference: What it was compared with.
        max_diff_allowed: The bound; None where transformers' own BF16 error is the yardstick.
        prompts: In the order sent.
        skipped: References that do not apply, with the reason.
        layers: First layer that differs, where hidden states were captured.
    """

    url: str
    model: str
    dtype: str
    caches: str
    reference: str
    max_diff_allowed: float | None
    prompts: list[PromptOutcome] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    layers: LayerReport | None = None

    @property
    def max_diff(self) -> float:
        """Largest difference over all prompts; NaN if there is one."""
        values = torch.tensor([prompt.max_diff for prompt in self.prompts], dtype=torch.float64)
        return float(values.max()) if len(values) else 0.0

    @property
    def failures(self) -> list[str]:
        """One sentence per broken limit, over prompts and as a whole."""
        broken = [
            f"{prompt.name}: {failure}" for prompt in self.prompts for failure in prompt.failures
        ]
        if not self.prompts:
            broken.append("nothing was compared; see what was skipped and why")
        judged = [p for p in self.prompts if p.yardstick_mean_diff is not None]
        if judged:
            # Per prompt the two means wander; over all of them their ratio is steady.
            total = sum(p.compared for p in judged)
            ours = sum(p.mean_diff * p.compared for p in judged) / max(1, total)
            theirs = sum((p.yardstick_mean_diff or 0.0) * p.compared for p in judged)
            theirs /= max(1, total)
            if not ours <= BF16_RATIO * theirs:
                broken.append(
                    f"mean |dlogp| {ours:.2e} is {ours / theirs if theirs else float('inf'):.1f} "
                    f"times transformers' own in BF16 ({theirs:.2e}), allowed {BF16_RATIO}"
                )
        if self.layers is not None and self.layers.first is not None:
            broken.append(f"hidden states differ first in {self.layers.first.describe()}")
        return broken

    @property
    def passed(self) -> bool:
        """Whether nothing is broken."""
        return not self.failures

    def first_difference(self) -> PromptOutcome | None:
        """The first prompt that has a difference beyond the bound."""
        return next((p for p in self.prompts if p.first_position is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        first = self.first_difference()
        return {
            "passed": self.passed,
            "failures": self.failures,
            "url": self.url,
            "model": self.model,
            "dtype": self.dtype,
            "caches": self.caches,
            "reference": self.reference,
            "max_diff": self.max_diff,
            "max_diff_allowed": self.max_diff_allowed,
            "compared": sum(prompt.compared for prompt in self.prompts),
            "excused": sum(prompt.excused for prompt in self.prompts),
            "first_difference": None
            if first is None
            else {"prompt": first.name, "position": first.first_position},
            "prompts": [asdict(prompt) for prompt in self.prompts],
            "skipped": self.skipped,
            "layers": None if self.layers is None else self.layers.to_dict(),
        }

    def render(self) -> str:
        """The report as text."""
        allowed = (
            f"mean within {BF16_RATIO} times transformers' own in BF16"
            if self.max_diff_allowed is None
            else f"max |dlogp| {self.max_diff_allowed:.1e}"
        )
        lines = [
            f"{self.model} at {self.url}",
            f"  {self.dtype} arithmetic, {self.caches}",
            f"  against {self.reference}; allowed: {allowed}",
            "",
            f"  {'prompt':<34}{'tokens':>8}{'compared':>10}{'excused':>9}{'max |dlogp|':>13}",
        ]
        for prompt in self.prompts:
            mark = "" if not prompt.failures else "  differs"
            if prompt.first_position is not None:
                mark += f" from position {prompt.first_position}"
            lines.append(
                f"  {prompt.name:<34}{prompt.prompt_tokens:>8}{prompt.compared:>10}"
                f"{prompt.excused:>9}{prompt.max_diff:>13.2e}{mark}"
            )
        lines += [f"  skipped: {reason}" for reason in self.skipped]
        if self.layers is not None:
            lines += ["", *self.layers.render()]
        lines += ["", "passed" if self.passed else "failed"]
        lines += [f"  {failure}" for failure in self.failures]
        return "\n".join(lines)


def new_report(client: ServerClient, facts: ServerFacts, reference: str) -> Report:
    """An empty report about a server.

    Args:
        client: Gives the address.
        facts: From the client.
        reference: What it will be compared with, in words.

    Returns:
        The report.
    """
    formats = facts.formats
    return Report(
        url=client.url,
        model=facts.model,
        dtype=facts.dtype,
        caches=f"latents {formats.latent}, index keys {formats.index_key}",
        reference=reference,
        max_diff_allowed=default_bound(facts),
    )


def check_golden(
    report: Report,
    client: ServerClient,
    facts: ServerFacts,
    entries: Iterable[tuple[str, GoldenEntry]],
    *,
    served: Identity | None,
    progress: Progress | None = None,
) -> None:
    """Compare the server with golden entries.

    Entries of other checkpoints or of other cache formats are skipped and named.

    Args:
        report: Receives the outcomes; its bound must be set.
        client: The server.
        facts: From the client.
        entries: Name and entry.
        served: The served checkpoint, from ``golden.identify``; None where it is on another
            machine: then the entries are taken to be of it.
        progress: Called with prompts done and to do.
    """
    assert report.max_diff_allowed is not None
    fitting = []
    for name, entry in entries:
        if served is not None and not served.made(entry):
            report.skipped.append(f"{name} (recorded with another checkpoint)")
        elif entry.formats != facts.formats:
            report.skipped.append(f"{name} (recorded with {_describe(entry)} caches)")
        elif len(entry.token_ids) > facts.max_total_tokens:
            report.skipped.append(f"{name} (longer than the server's cache)")
        else:
            fitting.append((name, entry))
    for done, (name, entry) in enumerate(fitting):
        if progress is not None:
            progress(done, len(fitting))
        prompt = entry.token_ids[: entry.prompt_length].tolist()
        answer = client.generate(prompt, len(entry.token_ids) - len(prompt))
        got = parse_generate(answer["meta_info"], prompt_length=len(prompt))
        report.prompts.append(judge_golden(name, got, entry, report.max_diff_allowed))


def _describe(entry: GoldenEntry) -> str:
    return f"{entry.formats.latent}/{entry.formats.index_key}"


def judge_golden(name: str, got: ServerLogprobs, entry: GoldenEntry, bound: float) -> PromptOutcome:
    """Judge one answer.

    Args:
        name: Of the entry.
        got: The server's log-probabilities of prompt and continuation.
        entry: The reference.
        bound: Allowed difference.

    Returns:
        The outcome. Where the server decoded another token, the rows before it are compared and the
        token itself is a difference, unless it lies after a near-tie.
    """
    known = got.rows + 1 < len(entry.token_ids)
    expected = entry.token_ids[(got.rows + 1)[known]]
    wrong = (got.token_ids[known] != expected).nonzero()
    failures, first = [], None
    if len(wrong):
        first_wrong = int(wrong[0])
        at = int(got.rows[known][first_wrong])
        if entry.first_near_tie is None or at < entry.first_near_tie:
            first = at + 1
            failures.append(
                f"token {at + 1} is {int(got.token_ids[known][first_wrong])}, expected "
                f"{int(expected[first_wrong])}"
            )
        before = got.rows < at
        got = ServerLogprobs(
            rows=got.rows[before],
            token_ids=got.token_ids[before],
            token_logprobs=got.token_logprobs[before],
            top_ids=got.top_ids[before],
            top_logprobs=got.top_logprobs[before],
        )
    comparison = compare_golden(got, entry)
    return _outcome(name, entry.prompt_length, comparison, bound, failures, first)


def _outcome(
    name: str,
    prompt_tokens: int,
    comparison: Comparison,
    bound: float,
    failures: Sequence[str] = (),
    first_position: int | None = None,
) -> PromptOutcome:
    row = comparison.first_row_over(bound)
    if row is not None:
        first_position = row + 1 if first_position is None else min(first_position, row + 1)
    return PromptOutcome(
        name=name,
        prompt_tokens=prompt_tokens,
        compared=comparison.compared,
        excused=comparison.excused,
        max_diff=comparison.max_diff,
        first_position=first_position,
        failures=[
            *failures,
            *comparison.failures(max_diff=bound, max_excused_fraction=MAX_EXCUSED_FRACTION),
        ],
        mean_diff=sum(diff for _, diff in comparison.row_diffs) / max(1, comparison.compared),
    )


def live_lengths(index_topk: int, longest: int) -> list[int]:
    """Prompt lengths around everything that changes the path of a token.

    Args:
        index_topk: Selection bites behind it.
        longest: Largest length allowed.

    Returns:
        Ascending lengths: one token, around ``index_topk``, around a page, and several pages.
    """
    wanted = {1, 5, 63, 64, 65, 130, index_topk - 1, index_topk, index_topk + 1, 3 * index_topk}
    return sorted(length for length in wanted if 1 <= length <= longest)


def check_live(
    report: Report,
    client: ServerClient,
    facts: ServerFacts,
    oracle: Oracle,
    lengths: Sequence[int],
    *,
    vocab: int,
    progress: Progress | None = None,
) -> None:
    """Compare the server with transformers, prompt by prompt.

    Args:
        report: Receives the outcomes. Without a bound, the BF16 error of transformers with the
            server's cache formats is the yardstick.
        client: The server.
        facts: From the client.
        oracle: FP32, with the server's cache formats if it computes in FP32, else with FP32 caches.
        lengths: Of the prompts.
        vocab: Prompt tokens are drawn from ``[0, vocab)``.
        progress: Called with prompts done and to do.
    """
    rounded = None
    if report.max_diff_allowed is None:
        rounded = Oracle(oracle.directory, formats=facts.formats, dtype=torch.bfloat16)
    for done, length in enumerate(lengths):
        if progress is not None:
            progress(done, len(lengths))
        name = f"{length} tokens"
        prompt = decided_prompt(oracle, vocab, length)
        if prompt is None:
            report.skipped.append(f"{name} (rounding decides every prompt of this length)")
            continue
        answer = client.generate(prompt, NEW_TOKENS)
        run = oracle.run([*prompt, *answer["output_ids"]])
        got = parse_generate(answer["meta_info"], prompt_length=length)
        if rounded is None:
            assert report.max_diff_allowed is not None
            comparison = compare_logprobs(got, run.logprobs, run.token_ids, run.first_near_tie())
            report.prompts.append(_outcome(name, length, comparison, report.max_diff_allowed))
            continue
        # Nothing is excused: a flipped selection is part of either's BF16 error.
        comparison = compare_logprobs(got, run.logprobs, run.token_ids)
        expected = run.logprobs[got.rows].gather(1, got.token_ids[:, None])[:, 0]
        theirs = rounded.run(run.token_ids).logprobs[got.rows].gather(1, got.token_ids[:, None])
        report.prompts.append(
            PromptOutcome(
                name=name,
                prompt_tokens=length,
                compared=comparison.compared,
                excused=0,
                max_diff=comparison.max_diff,
                first_position=None,
                failures=[],
                mean_diff=float((got.token_logprobs - expected).abs().mean()),
                yardstick_mean_diff=float((theirs[:, 0].float() - expected).abs().mean()),
            )
        )
