"""The trained tiny checkpoint, and copies of it that are wrong on purpose."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-glm-dsa"

needs_checkpoint = pytest.mark.skipif(
    not (CHECKPOINT / "model.safetensors").is_file(),
    reason="checkpoints/tiny-glm-dsa is missing; train it as cookbook/train_tiny/README.md says",
)


def _copy(change: Callable[[str, torch.Tensor, dict], None]) -> str:
    """Directory of a copy.

    Args:
        change: Called with each indexer tensor's name, the tensor and the config; changes it in
            place.
    """
    directory = Path(tempfile.mkdtemp(prefix="tiny-glm-dsa-"))
    for path in CHECKPOINT.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).symlink_to(path)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    tensors = load_file(CHECKPOINT / "model.safetensors")
    for name, tensor in tensors.items():
        if ".indexer." in name:
            change(name, tensor, config)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def _halves_to_neighbours(name: str, tensor: torch.Tensor, config: dict) -> None:
    """Exchange rows so that turning neighbours of the result is turning halves of the original."""
    rope = config["qk_rope_head_dim"]
    order = [i // 2 + i % 2 * (rope // 2) for i in range(rope)]
    if ".wq_b." in name:
        rows = tensor.view(config["index_n_heads"], config["index_head_dim"], -1)
        rows[:, :rope] = rows[:, order]
    elif ".wk." in name or ".k_norm." in name:
        tensor[:rope] = tensor[order]


@functools.cache
def with_half_split_index_rope() -> str:
    """A server of this copy does what one with the half-split layout does to the original."""
    return _copy(_halves_to_neighbours)


@functools.cache
def with_two_index_rope_layouts() -> str:
    """The same, of queries only: keys keep the layout that they were trained in."""

    def change(name: str, tensor: torch.Tensor, config: dict) -> None:
        if ".wq_b." in name:
            _halves_to_neighbours(name, tensor, config)

    return _copy(change)


@functools.cache
def with_dropped_index_keys() -> str:
    """A server of this copy finds zeros where it looks for index keys."""

    def change(name: str, tensor: torch.Tensor, _config: dict) -> None:
        if ".k_norm." in name:
            tensor.zero_()

    return _copy(change)
