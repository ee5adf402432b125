"""Golden entries: a few of the oracle's numbers, small enough to keep in a repository.

They let a server be checked where transformers is not wanted. An entry names the checkpoint by its
spec and the hash of its weights, so a change to the writer cannot pass unnoticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.writer import read_manifest
from sglang_glm.verification.compare import Comparison, ServerLogprobs
from sglang_glm.verification.formats import CacheFormats

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_glm.verification.oracle import OracleRun

TOP = 5
"""Most likely tokens kept a row: what the OpenAI API and ``/generate`` are asked for in tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenEntry:
    """One sequence on one checkpoint.

    Attributes:
        spec: The checkpoint, or None if this package did not write it.
        weights_sha256: Hash of its weights, from :func:`identify`.
        formats: Number formats of the caches.
        versions: Of the packages that computed the entry.
        prompt_length: Tokens of the prompt; the rest is the greedy continuation.
        token_ids: ``[tokens]``, int64. Prompt and continuation.
        rows: ``[entries]``, int64, ascending. Rows kept; row ``r`` predicts token ``r + 1``.
        token_logprobs: ``[entries]``, FP32. Log-probability of token ``row + 1``.
        top_ids: ``[entries, TOP]``, int32.
        top_logprobs: ``[entries, TOP]``, FP32.
        first_near_tie: See ``OracleRun.first_near_tie``.
    """

    spec: CheckpointSpec | None
    weights_sha256: str
    formats: CacheFormats
    versions: dict[str, str]
    prompt_length: int
    token_ids: torch.Tensor
    rows: torch.Tensor
    token_logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    first_near_tie: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint is.

    Attributes:
        spec: If this package wrote it. Specs with equal weights may differ in ``index_topk``.
        weights_sha256: As its manifest says; for another's checkpoint over its config and weights.
    """

    spec: CheckpointSpec | None
    weights_sha256: str

    def made(self, entry: GoldenEntry) -> bool:
        """Whether an entry was computed from this checkpoint."""
        return (entry.spec, entry.weights_sha256) == (self.spec, self.weights_sha256)


def identify(directory: Path) -> Identity:
    """Identify a checkpoint; reads all of its weights if this package did not write it.

    Args:
        directory: A checkpoint.

    Returns:
        Its identity.

    Raises:
        ValueError: If there are no weights.
    """
    manifest: dict[str, Any] | None = read_manifest(directory)
    if manifest is not None:
        return Identity(
            spec=spec_from_json(manifest["spec"]), weights_sha256=manifest["weights_sha256"]
        )
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"identify: {directory} has no *.safetensors, expected a checkpoint directory"
        )
    digest = hashlib.sha256()
    for path in [directory / "config.json", *files]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return Identity(spec=None, weights_sha256=digest.hexdigest())


def make_entry(
    spec: CheckpointSpec | None,
    weights_sha256: str,
    formats: CacheFormats,
    run: OracleRun,
    *,
    prompt_length: int,
    first_row: int = 0,
) -> GoldenEntry:
    """Reduce a greedy run to an entry.

    Args:
        spec: The checkpoint that was run, None if it is not one of ours.
        weights_sha256: From :func:`identify`.
        formats: What the oracle rounded to.
        run: From ``Oracle.greedy``.
        prompt_length: Tokens of the prompt.
        first_row: Leave out earlier rows.

    Returns:
        The entry.
    """
    token_ids = torch.cat([run.token_ids, run.logprobs[-1:].argmax(-1)])
    rows = torch.arange(first_row, len(run.logprobs))
    top_logprobs, top_ids = run.top(TOP)
    return GoldenEntry(
        spec=spec,
        weights_sha256=weights_sha256,
        formats=formats,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        prompt_length=prompt_length,
        token_ids=token_ids,
        rows=rows,
        token_logprobs=run.logprobs[rows].gather(1, token_ids[rows + 1, None])[:, 0],
        top_ids=top_ids[rows].to(torch.int32),
        top_logprobs=top_logprobs[rows],
        first_near_tie=run.first_near_tie(),
    )


def save_entry(entry: GoldenEntry, path: Path) -> None:
    """Write an entry.

    Args:
        entry: The entry.
        path: A ``.safetensors`` file.
    """
    header: dict[str, Any] = {
        "spec": None if entry.spec is None else dataclasses.asdict(entry.spec),
        "formats": dataclasses.asdict(entry.formats),
        "weights_sha256": entry.weights_sha256,
        "versions": entry.versions,
        "prompt_length": entry.prompt_length,
        "first_near_tie": entry.first_near_tie,
    }
    tensors = {
        "token_ids": entry.token_ids,
        "rows": entry.rows,
        "token_logprobs": entry.token_logprobs,
        "top_ids": entry.top_ids,
        "top_logprobs": entry.top_logprobs,
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"golden": json.dumps(header, sort_keys=True)},
    )
    path.chmod(0o644)


def spec_from_json(values: dict[str, Any]) -> CheckpointSpec:
    """Read a spec that went through JSON, which has lists for tuples.

    Args:
        values: Field to value, as in a manifest or an entry's header.

    Returns:
        The spec.
    """
    fields: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value for field, value in values.items()
    }
    return CheckpointSpec(**fields)


def load_entry(path: Path) -> GoldenEntry:
    """Read an entry.

    Args:
        path: As written by :func:`save_entry`.

    Returns:
        The entry.

    Raises:
        ValueError: If the file is not a golden entry.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "golden" not in metadata:
            raise ValueError(
                f"load_entry: {path} has no golden header, expected a file written by "
                "`sglang-glm verify --write-golden`"
            )
        header = json.loads(metadata["golden"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return GoldenEntry(
        spec=None if header["spec"] is None else spec_from_json(header["spec"]),
        weights_sha256=header["weights_sha256"],
        formats=CacheFormats(**header["formats"]),
        versions=header["versions"],
        prompt_length=header["prompt_length"],
        first_near_tie=header["first_near_tie"],
        **tensors,
    )


def compare_golden(server: ServerLogprobs, entry: GoldenEntry) -> Comparison:
    """Compare a server's answer with an entry.

    Top-k lists are compared rank by rank: an entry does not hold the log-probabilities of tokens
    outside its own list, and two tokens within rounding may swap ranks.

    Args:
        server: The server's entries; rows that the entry lacks are passed over.
        entry: The entry.

    Returns:
        The outcome, ``max_top_loss`` being the largest difference at equal rank.

    Raises:
        ValueError: If a token differs: the server did not see the prompt or, greedily decoded,
            chose otherwise.
    """
    wanted = torch.isin(server.rows, entry.rows)
    rows, ids = server.rows[wanted], server.token_ids[wanted]
    at = torch.searchsorted(entry.rows, rows)
    expected_ids = entry.token_ids[rows + 1]
    if not torch.equal(ids, expected_ids):
        first = int((ids != expected_ids).nonzero()[0])
        raise ValueError(
            f"compare_golden: token {int(rows[first]) + 1} is {int(ids[first])}, expected "
            f"{int(expected_ids[first])}; prompt_length is {entry.prompt_length}"
        )
    got, expected = server.token_logprobs[wanted], entry.token_logprobs[at]
    diff = (got - expected).abs()
    count = min(server.top_ids.shape[1], TOP)
    rank_diff = torch.zeros_like(diff)
    if count:
        rank_diff = (
            (server.top_logprobs[wanted][:, :count] - entry.top_logprobs[at][:, :count])
            .abs()
            .amax(1)
        )
    limit = len(entry.token_ids) if entry.first_near_tie is None else entry.first_near_tie
    excused = rows >= limit
    kept = diff[~excused]
    worst = ""
    if len(kept):
        index = int(kept.nan_to_num(nan=float("inf")).argmax())
        worst = (
            f"row {int(rows[~excused][index])}: got {float(got[~excused][index]):.7f}, "
            f"expected {float(expected[~excused][index]):.7f}"
        )
    return Comparison(
        compared=len(kept),
        excused=int(excused.sum()),
        max_diff=float(kept.max()) if len(kept) else 0.0,
        max_excused_diff=float(diff[excused].max()) if bool(excused.any()) else 0.0,
        max_top_loss=float(rank_diff[~excused].max()) if len(kept) else 0.0,
        worst=worst,
        row_diffs=tuple(zip(rows[~excused].tolist(), kept.tolist(), strict=True)),
    )
