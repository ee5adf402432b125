"""Writes a trained state as a checkpoint directory: ``python -m cookbook.train_tiny.export``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from cookbook.train_tiny.card import render_card
from cookbook.train_tiny.curve import read
from cookbook.train_tiny.pair_scale import scale_pairs
from cookbook.train_tiny.spec import TINY
from sglang_glm.checkpoint.hf_config import build_config, build_generation_config
from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.checkpoint.tiny.words import vocabulary
from sglang_glm.checkpoint.tokenizer import save_tokenizer, special_ids

if TYPE_CHECKING:
    import torch

    from sglang_glm.checkpoint.spec import CheckpointSpec


def write(spec: CheckpointSpec, tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Write config, tokenizer, chat template and weights.

    Args:
        spec: Dimensions.
        tensors: Checkpoint name to tensor.
        directory: Created if missing; files of the same names are replaced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    ids = special_ids(tokenizer)
    for name, values in (
        ("config.json", build_config(spec, ids)),
        ("generation_config.json", build_generation_config(ids)),
    ):
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")
    save_tokenizer(tokenizer, directory, spec.max_position_embeddings)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="the trainer's --out")
    parser.add_argument("directory", type=Path, help="the checkpoint to write")
    args = parser.parse_args()
    tensors = load_file(args.state / "model.safetensors")
    scale_pairs(tensors, TINY)
    write(TINY, tensors, args.directory)
    count = sum(tensor.numel() for tensor in tensors.values())
    # The log may go on beyond the state, if the run was cut short.
    steps = json.loads((args.state / "state.json").read_text())["steps"]
    rows = [row for row in read(args.state / "log.jsonl") if row.get("step", 0) <= steps]
    card = render_card(TINY, rows, count, len(vocabulary()))
    (args.directory / "README.md").write_text(card)


if __name__ == "__main__":
    main()
