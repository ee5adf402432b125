"""The trained tiny checkpoint, and copies of it that are wrong on purpose."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-glm-dsa"

needs_checkpoint = pytest.mark.skipif(
    not (CHECKPOINT / "model.safetensors").is_file(),
    reason="checkpoints/tiny-glm-dsa is missing; train it as cookbook/train_tiny/README.md says",
)


@functools.cache
def with_config(**changes: object) -> str:
    """Directory of a copy whose config.json differs; the same changes share one copy."""
    directory = Path(tempfile.mkdtemp(prefix="tiny-glm-dsa-"))
    for path in CHECKPOINT.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    shutil.copymode(CHECKPOINT / "config.json", directory / "config.json")
    return str(directory)
