"""The trained tiny checkpoint, and a copy of it that is wrong on purpose."""

import functools
import json
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-glm-dsa"

needs_checkpoint = pytest.mark.skipif(
    not (CHECKPOINT / "model.safetensors").is_file(),
    reason="checkpoints/tiny-glm-dsa is missing; train it as cookbook/train_tiny/README.md says",
)


@functools.cache
def with_two_index_rope_layouts() -> str:
    """Directory of a copy whose index queries turn pairs (i, i + 32), its keys (2 i, 2 i + 1).

    The server refuses a config that asks for it, so rows of ``wq_b`` are exchanged: turning
    neighbours of the result is turning halves of the original.
    """
    directory = Path(tempfile.mkdtemp(prefix="tiny-glm-dsa-"))
    for path in CHECKPOINT.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).symlink_to(path)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    rope = config["qk_rope_head_dim"]
    order = [i // 2 + i % 2 * (rope // 2) for i in range(rope)]
    tensors = load_file(CHECKPOINT / "model.safetensors")
    for name, tensor in tensors.items():
        if ".indexer.wq_b." in name:
            heads = tensor.view(config["index_n_heads"], config["index_head_dim"], -1)
            heads[:, :rope] = heads[:, order]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)
