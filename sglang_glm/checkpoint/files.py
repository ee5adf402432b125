"""A checkpoint directory's weight files: all there, and none cut short.

A download that was interrupted is what fails most often, and the loader's message names no file.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"


def check_files(directory: Path) -> None:
    """Refuse a directory with missing or shortened safetensors files. Only headers are read.

    Args:
        directory: Where config.json and the weights lie.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    index = directory / INDEX
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in named if not (directory / name).exists())
        if missing:
            raise ValueError(
                f"checkpoint file {directory / missing[0]} is missing ({len(missing)} of the {len(named)} that "
                f"{INDEX} names); download the checkpoint again"
            )
    for file in sorted(directory.glob("*.safetensors")):
        expected, found = safetensors_size(file), file.stat().st_size
        if found != expected:
            raise ValueError(
                f"checkpoint file {file} has {found} bytes, expected {expected} by its header; download it again"
            )


def safetensors_size(file: Path) -> int:
    """Bytes that a safetensors file must have by its header; as many of the header as must be there.

    The format is a little-endian uint64 header length, the header as JSON, then the data, in which
    `data_offsets` are relative (https://huggingface.co/docs/safetensors).
    """
    found = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        if len(prefix) < 8:
            return 8
        data_start = 8 + int(struct.unpack("<Q", prefix)[0])
        if data_start > found:
            return data_start
        header = json.loads(opened.read(data_start - 8))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return data_start + max(ends, default=0)
