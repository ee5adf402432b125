"""Weight files of a checkpoint before anything is loaded.

test_whole          every checkpoint that the writers here write, and a directory without weights
test_cut_short      at any length, as an interrupted download leaves it; and one that is too long
test_missing_shard  a file that the index names
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_glm.checkpoint.files import INDEX, check_files, safetensors_size
from tests.support.checkpoints import checkpoint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path, metadata={"format": "pt"})
    return path


def test_whole(tmp_path: Path, file: Path) -> None:
    assert safetensors_size(file) == file.stat().st_size
    check_files(tmp_path)
    check_files(tmp_path / "no such directory")
    check_files(Path(checkpoint("--mtp", "--index-topk", "8")))


def test_cut_short(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    for length in (0, 7, 8, 9, 60, len(whole) - 28, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"{file.name} has {length} bytes, expected \d+ by"):
            check_files(tmp_path)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=rf"has {len(whole) + 1} bytes, expected {len(whole)} by"):
        check_files(tmp_path)


def test_missing_shard(tmp_path: Path, file: Path) -> None:
    other = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file.name, "c": other}}))
    with pytest.raises(ValueError, match=rf"{other} is missing \(1 of the 2 that"):
        check_files(tmp_path)
