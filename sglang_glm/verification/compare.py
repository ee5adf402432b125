"""Sets a server's log-probabilities against the oracle's. Pure functions over tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLogprobs:
    """What a server said about one sequence.

    Row ``r`` is the distribution of token ``r + 1``, as in ``OracleRun.logprobs``.

    Attributes:
        rows: ``[entries]``, int64. Row of each entry.
        token_ids: ``[entries]``, int64. Token ``row + 1`` of the sequence.
        token_logprobs: ``[entries]``, FP32. Its log-probability.
        top_ids: ``[entries, k]``, int64. Most likely tokens, best first; ``k`` may be 0.
        top_logprobs: ``[entries, k]``, FP32.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    token_logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Outcome over one or more sequences.

    Attributes:
        compared: Entries before any proven near-tie.
        excused: Entries at or after one.
        max_diff: Largest ``|got - expected|`` of the compared entries' log-probabilities, sampled
            and top-k.
        max_excused_diff: The same over excused entries, for information.
        max_top_loss: Largest amount by which a token that the server ranked in its top k is less
            likely, by the oracle, than the oracle's own token of that rank.
        worst: Where ``max_diff`` occurred, in words; empty if nothing was compared.
        row_diffs: Row and difference of every compared entry of one sequence, in the server's
            order; empty for a sum over several sequences, whose rows do not compare.
    """

    compared: int
    excused: int
    max_diff: float
    max_excused_diff: float
    max_top_loss: float
    worst: str
    row_diffs: tuple[tuple[int, float], ...] = ()

    def first_row_over(self, bound: float) -> int | None:
        """First row of one sequence whose difference exceeds a bound.

        Args:
            bound: Allowed difference of log-probabilities.

        Returns:
            The row, a NaN counting as over; None if there is none.
        """
        return min((row for row, diff in self.row_diffs if not diff <= bound), default=None)

    @property
    def excused_fraction(self) -> float:
        """Share of entries that were excused, 0 for an empty comparison."""
        total = self.compared + self.excused
        return self.excused / total if total else 0.0

    def failures(self, *, max_diff: float, max_excused_fraction: float) -> list[str]:
        """Check against a budget.

        Args:
            max_diff: Allowed difference of log-probabilities; also allowed for top-k ranks, where
                it can apply twice (two tokens may each be off).
            max_excused_fraction: Allowed share of excused entries.

        Returns:
            One sentence per broken limit; empty if the comparison passes.
        """
        broken = []
        if self.compared == 0:
            broken.append("nothing was compared: every entry lies after a near-tie")
        # "not <=" so that a NaN fails.
        if not self.max_diff <= max_diff:
            broken.append(f"max |dlogp| {self.max_diff:.3e} > {max_diff:.1e} at {self.worst}")
        if not self.max_top_loss <= 2 * max_diff:
            broken.append(
                f"a top-k token is {self.max_top_loss:.3e} less likely than the rank allows "
                f"(> {2 * max_diff:.1e})"
            )
        if self.excused_fraction > max_excused_fraction:
            broken.append(
                f"{self.excused} of {self.compared + self.excused} entries excused "
                f"({self.excused_fraction:.1%} > {max_excused_fraction:.1%})"
            )
        return broken


def compare_logprobs(
    server: ServerLogprobs,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    first_near_tie: int | None = None,
) -> Comparison:
    """Compare one sequence.

    Args:
        server: The server's entries.
        logprobs: ``[rows, vocab_size]``, FP32. The oracle's; see ``OracleRun``.
        token_ids: ``[rows]`` or longer, int64. The sequence that the oracle ran.
        first_near_tie: Rows from this one on are excused.

    Returns:
        The outcome.

    Raises:
        ValueError: If the server answered for another sequence or for rows that the oracle lacks.
    """
    rows = server.rows
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(logprobs)):
        raise ValueError(
            f"compare_logprobs: rows span [{int(rows.min())}, {int(rows.max())}], "
            f"expected within the oracle's {len(logprobs)} rows; run the oracle on the whole "
            "sequence that the server answered for"
        )
    known = rows + 1 < len(token_ids)
    mismatch = token_ids[(rows + 1)[known]] != server.token_ids[known]
    if bool(mismatch.any()):
        at = int(rows[known][mismatch][0]) + 1
        raise ValueError(
            f"compare_logprobs: token {at} differs between server and oracle; "
            "run the oracle on the server's own tokens"
        )

    expected = logprobs[rows].gather(1, server.token_ids[:, None])[:, 0]
    diff = (server.token_logprobs - expected).abs()
    top_loss = torch.zeros_like(diff)
    count = server.top_ids.shape[1]
    if count:
        at_ids = logprobs[rows].gather(1, server.top_ids)
        diff = torch.maximum(diff, (server.top_logprobs - at_ids).abs().amax(1))
        ranked = logprobs[rows].topk(count, dim=-1).values
        top_loss = (ranked - at_ids).amax(1).clamp(min=0)

    # Not amax over nan-free values: a NaN must come through.
    excused = rows >= (len(logprobs) if first_near_tie is None else first_near_tie)
    kept, dropped = diff[~excused], diff[excused]
    worst = ""
    if len(kept):
        index = int(kept.nan_to_num(nan=float("inf")).argmax())
        at = int(rows[~excused][index])
        token = int(server.token_ids[~excused][index])
        worst = (
            f"row {at}, token {token}: got {float(server.token_logprobs[~excused][index]):.7f}, "
            f"expected {float(expected[~excused][index]):.7f}"
        )
    return Comparison(
        compared=len(kept),
        excused=len(dropped),
        max_diff=float(kept.max()) if len(kept) else 0.0,
        max_excused_diff=float(dropped.max()) if len(dropped) else 0.0,
        max_top_loss=float(top_loss[~excused].max()) if len(kept) else 0.0,
        worst=worst,
        row_diffs=tuple(zip(rows[~excused].tolist(), kept.tolist(), strict=True)),
    )


def merge_comparisons(comparisons: Iterable[Comparison]) -> Comparison:
    """Add up comparisons of several sequences.

    Args:
        comparisons: At least one.

    Returns:
        Their sum; ``worst`` is that of the sequence with the largest difference.

    Raises:
        ValueError: If there is none.
    """
    parts = list(comparisons)
    if not parts:
        raise ValueError("merge_comparisons: got no comparison, expected at least one")

    def largest(values: Iterable[float]) -> float:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        return float(tensor.max())

    by_diff = max(parts, key=lambda part: (part.max_diff != part.max_diff, part.max_diff))
    return Comparison(
        compared=sum(part.compared for part in parts),
        excused=sum(part.excused for part in parts),
        max_diff=largest(part.max_diff for part in parts),
        max_excused_diff=largest(part.max_excused_diff for part in parts),
        max_top_loss=largest(part.max_top_loss for part in parts),
        worst=by_diff.worst,
    )


def parse_generate(meta_info: Mapping[str, Any], *, prompt_length: int) -> ServerLogprobs:
    """Read SGLang's ``/generate`` answer.

    Args:
        meta_info: Of one answer to a request with ``return_logprob`` true. Prompt entries are
            taken if ``logprob_start_len`` asked for them.
        prompt_length: Tokens of the prompt.

    Returns:
        Prompt entries, then output entries. The first ``k`` top tokens are kept, ``k`` being the
        smallest number that every entry has.

    Raises:
        ValueError: If ``meta_info`` has no log-probabilities.
    """
    if "output_token_logprobs" not in meta_info:
        raise ValueError(
            "parse_generate: meta_info has no output_token_logprobs; "
            "send the request with return_logprob=true"
        )
    prompt: Sequence[Any] = meta_info.get("input_token_logprobs") or []
    prompt_top: Sequence[Any] = meta_info.get("input_top_logprobs") or [None] * len(prompt)
    output: Sequence[Any] = meta_info["output_token_logprobs"]
    output_top: Sequence[Any] = meta_info.get("output_top_logprobs") or [None] * len(output)

    # The prompt's entries end at its last token, wherever they start.
    entries = [
        (prompt_length - len(prompt) + index - 1, entry, top)
        for index, (entry, top) in enumerate(zip(prompt, prompt_top, strict=True))
    ]
    entries += [
        (prompt_length + index - 1, entry, top)
        for index, (entry, top) in enumerate(zip(output, output_top, strict=True))
    ]
    # The first token of a run has no log-probability.
    entries = [entry for entry in entries if entry[1][0] is not None]
    count = min((len(top or []) for _, _, top in entries), default=0)
    tops = [(top or [])[:count] for _, _, top in entries]
    return ServerLogprobs(
        rows=torch.tensor([row for row, _, _ in entries], dtype=torch.int64),
        token_ids=torch.tensor([entry[1] for _, entry, _ in entries], dtype=torch.int64),
        token_logprobs=torch.tensor([entry[0] for _, entry, _ in entries], dtype=torch.float32),
        top_ids=torch.tensor([[item[1] for item in top] for top in tops], dtype=torch.int64).view(
            len(entries), count
        ),
        top_logprobs=torch.tensor(
            [[item[0] for item in top] for top in tops], dtype=torch.float32
        ).view(len(entries), count),
    )
