"""Keeps oracle runs on disk, so that a test suite pays for each once."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from sglang_glm.verification.formats import CacheFormats
from sglang_glm.verification.oracle import Oracle, OracleRun

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_RUN_VERSION = 1
"""Raised whenever the oracle would compute something else for the same inputs."""


class ReferenceCache:
    """Oracle runs of one checkpoint; transformers is loaded on the first miss only."""

    def __init__(
        self,
        checkpoint: Path,
        cache_directory: Path,
        *,
        formats: CacheFormats | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Open or create the cache.

        Args:
            checkpoint: The checkpoint directory.
            cache_directory: Where to keep runs; created if missing.
            formats: See ``Oracle``.
            dtype: See ``Oracle``.
        """
        self.checkpoint = checkpoint
        self.cache_directory = cache_directory
        self.formats = formats or CacheFormats()
        self.dtype = dtype
        self._oracle: Oracle | None = None
        digest = hashlib.sha256()
        for path in sorted(checkpoint.iterdir()):
            if path.name == "config.json" or path.suffix == ".safetensors":
                digest.update(path.name.encode())
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(
            json.dumps(
                [
                    _RUN_VERSION,
                    dataclasses.asdict(self.formats),
                    str(dtype),
                    *(importlib.metadata.version(name) for name in ("torch", "transformers")),
                ]
            ).encode()
        )
        self._prefix = digest.hexdigest()
        cache_directory.mkdir(parents=True, exist_ok=True)

    @property
    def oracle(self) -> Oracle:
        """The oracle behind the cache, loaded now if it was not."""
        if self._oracle is None:
            self._oracle = Oracle(self.checkpoint, formats=self.formats, dtype=self.dtype)
        return self._oracle

    def _path(self, kind: str, token_ids: Sequence[int], extra: int = 0) -> Path:
        digest = hashlib.sha256(
            json.dumps([self._prefix, kind, list(token_ids), extra]).encode()
        ).hexdigest()
        return self.cache_directory / f"{digest[:32]}.safetensors"

    def run(self, token_ids: Sequence[int]) -> OracleRun:
        """As ``Oracle.run``, without hidden states of the layers.

        Args:
            token_ids: The sequence.

        Returns:
            The run.
        """
        path = self._path("run", token_ids)
        if not path.is_file():
            _save(path, self.oracle.run(token_ids))
        return _load(path)

    def greedy(self, prompt: Sequence[int], count: int) -> OracleRun:
        """As ``Oracle.greedy``.

        Args:
            prompt: The prompt.
            count: Tokens to add.

        Returns:
            The run.
        """
        path = self._path("greedy", prompt, count)
        if not path.is_file():
            _save(path, self.oracle.greedy(prompt, count))
        return _load(path)


def _save(path: Path, run: OracleRun) -> None:
    tensors = {
        "token_ids": run.token_ids,
        "logprobs": run.logprobs,
        "final_hidden": run.final_hidden,
        "relative_gap": run.relative_gap,
    } | {f"selections.{layer}": chosen for layer, chosen in run.selections.items()}
    # Renamed into place: two test processes may want the same run.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.rename(path)


def _load(path: Path) -> OracleRun:
    tensors = load_file(path)
    return OracleRun(
        token_ids=tensors["token_ids"],
        logprobs=tensors["logprobs"],
        hidden_states=torch.empty(0),
        final_hidden=tensors["final_hidden"],
        selections={
            int(name.removeprefix("selections.")): tensor
            for name, tensor in tensors.items()
            if name.startswith("selections.")
        },
        relative_gap=tensors["relative_gap"],
    )
