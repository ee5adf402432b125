"""Writes a checkpoint directory, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from sglang_glm.checkpoint.constructed import build_constructed
from sglang_glm.checkpoint.fp8 import is_quantized, quantize_blocks
from sglang_glm.checkpoint.hf_config import build_config, build_generation_config
from sglang_glm.checkpoint.random_weights import draw_tensor
from sglang_glm.checkpoint.tensors import TensorSpec, iter_tensors
from sglang_glm.checkpoint.tokenizer import save_tokenizer, special_ids, train_tokenizer

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec

MANIFEST = "sglang_glm_checkpoint.json"
"""Marks a directory as written by this module; holds the spec and the weights' hash."""

FORMAT_VERSION = 2
"""Raised whenever the same spec would give other bytes."""

SHARD_BYTES = 2 * 2**30

Progress = Callable[[int, int], None]
"""Called with bytes written so far and bytes in all."""


def stored_bytes(spec: CheckpointSpec, tensor: TensorSpec) -> int:
    """Size of one tensor in the files, its FP8 scale included.

    Args:
        spec: The checkpoint's spec.
        tensor: An entry of ``iter_tensors(spec)``.

    Returns:
        Bytes.
    """
    count = 1
    for size in tensor.shape:
        count *= size
    if is_quantized(spec, tensor.name):
        rows, columns = tensor.shape
        return count + 4 * -(-rows // 128) * -(-columns // 128)
    return count * (4 if tensor.kind == "router_bias" else 2)


def _plan_shards(spec: CheckpointSpec) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in iter_tensors(spec):
        grown = size + stored_bytes(spec, tensor)
        if shards[-1] and grown > SHARD_BYTES:
            shards.append([])
            grown = stored_bytes(spec, tensor)
        shards[-1].append(tensor)
        size = grown
    return shards


def _stored_tensors(
    spec: CheckpointSpec, tensor: TensorSpec, constructed: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    drawn = constructed.get(tensor.name)
    if drawn is None:
        drawn = draw_tensor(spec, tensor)
    if not is_quantized(spec, tensor.name):
        yield tensor.name, drawn
        return
    weight_fp8, scale = quantize_blocks(drawn)
    yield tensor.name, weight_fp8
    yield f"{tensor.name}_scale_inv", scale


def _write_weights(
    spec: CheckpointSpec,
    constructed: dict[str, torch.Tensor],
    directory: Path,
    progress: Progress | None,
) -> str:
    shards = _plan_shards(spec)
    total = sum(stored_bytes(spec, tensor) for shard in shards for tensor in shard)
    weight_map: dict[str, str] = {}
    digest = hashlib.sha256()
    written = 0
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for tensor in shard:
            for stored_name, stored in _stored_tensors(spec, tensor, constructed):
                tensors[stored_name] = stored
                weight_map[stored_name] = name
                digest.update(stored_name.encode())
                digest.update(stored.contiguous().view(torch.uint8).numpy().data)
            written += stored_bytes(spec, tensor)
            if progress is not None:
                progress(written, total)
        save_file(tensors, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    return digest.hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_manifest(directory: Path) -> dict[str, object] | None:
    """Read the manifest of a checkpoint of ours.

    Args:
        directory: Any path.

    Returns:
        The manifest (``format_version``, ``spec``, ``weights_sha256``), or None if ``directory``
        does not hold a whole checkpoint written by :func:`write_checkpoint`.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return None
    manifest: dict[str, object] = json.loads(path.read_text())
    return manifest


def _manifest_spec(spec: CheckpointSpec) -> dict[str, object]:
    # Through JSON, so that tuples compare equal to what is read back.
    plain: dict[str, object] = json.loads(json.dumps(dataclasses.asdict(spec)))
    return plain


def _refuse_foreign(directory: Path, force: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"checkpoint: {directory} is a file, expected a directory to write")
    if any(directory.iterdir()) and read_manifest(directory) is None and not force:
        raise ValueError(
            f"checkpoint: {directory} is not empty and was not written by this command; "
            "choose another directory, or pass --force to replace its contents"
        )


def write_checkpoint(
    spec: CheckpointSpec,
    directory: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Write a checkpoint that SGLang and transformers load.

    The files are written beside ``directory`` under a temporary name and moved into place when
    complete: an interrupted run leaves no half checkpoint under ``directory``.

    Args:
        spec: What to write.
        directory: Where. A checkpoint of ours already there is replaced.
        force: Also replace a non-empty directory that is not ours.
        progress: Called after each tensor.

    Returns:
        True if files were written; False if ``directory`` already holds exactly this checkpoint.

    Raises:
        ValueError: If ``directory`` holds something else and ``force`` is not set, or the
            vocabulary cannot hold GLM's tokens, or a script cannot be followed.
        RuntimeError: If the disk is too small.
    """
    _refuse_foreign(directory, force)
    manifest = read_manifest(directory)
    if (
        manifest is not None
        and manifest.get("format_version") == FORMAT_VERSION
        and manifest.get("spec") == _manifest_spec(spec)
    ):
        return False

    tokenizer = train_tokenizer(spec.vocab_size)
    constructed = build_constructed(spec, tokenizer)
    directory.parent.mkdir(parents=True, exist_ok=True)
    total = sum(stored_bytes(spec, tensor) for tensor in iter_tensors(spec))
    free = shutil.disk_usage(directory.parent).free
    if total > free:
        raise RuntimeError(
            f"checkpoint: {total / 1e9:.2f} GB needed under {directory.parent}, "
            f"{free / 1e9:.2f} GB free; use smaller dimensions or another disk"
        )

    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    try:
        # mkdtemp makes a private directory; a checkpoint is as readable as any file.
        partial.chmod(0o755)
        ids = special_ids(tokenizer)
        _write_json(partial / "config.json", build_config(spec, ids))
        _write_json(partial / "generation_config.json", build_generation_config(ids))
        save_tokenizer(tokenizer, partial, spec.max_position_embeddings)
        weights_sha256 = _write_weights(spec, constructed, partial, progress)
        _write_json(
            partial / MANIFEST,
            {
                "format_version": FORMAT_VERSION,
                "spec": _manifest_spec(spec),
                "weights_sha256": weights_sha256,
            },
        )
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return True
