"""What a run leaves: its log, and its parameters, from which another goes on."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from cookbook.train_tiny.parameters import stack, unstack
from cookbook.train_tiny.spec import TINY

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from cookbook.train_tiny.model import Model

MODEL, RESIDUAL, LOG, STATE = "model.safetensors", "residual.safetensors", "log.jsonl", "state.json"


class Log:
    """Appends lines to the log, and says them."""

    def __init__(self, path: Path, started: float) -> None:
        """Open it.

        Args:
            path: The file; lines of earlier runs are kept.
            started: When the process began.
        """
        self.path = path
        self.started = started

    def write(self, **values: Any) -> None:
        """Append one line."""
        values = {"second": round(time.time() - self.started, 1), **values}
        line = json.dumps(
            {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        )
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def save(model: Model, out: Path, state: dict[str, Any]) -> None:
    """Write model, the rest of its FP32 values and the state, each whole or not at all."""
    tensors = {name: value.detach() for name, value in model.parameters.items()}
    high = {
        name: value if name.endswith("e_score_correction_bias") else value.bfloat16()
        for name, value in tensors.items()
    }
    low = {name: (value - high[name].float()).bfloat16() for name, value in tensors.items()}
    for name, values in ((MODEL, high), (RESIDUAL, low)):
        partial = out / f"{name}.partial"
        split = unstack(values, model.spec)
        save_file({k: v.contiguous().cpu() for k, v in split.items()}, partial, {"format": "pt"})
        os.replace(partial, out / name)
    partial = out / f"{STATE}.partial"
    partial.write_text(json.dumps(state))
    os.replace(partial, out / STATE)


def load(directory: Path, device: str) -> dict[str, torch.Tensor]:
    """Read the parameters that :func:`save` wrote; the residual may be missing."""
    values = {k: v.float() for k, v in load_file(directory / MODEL).items()}
    if (directory / RESIDUAL).is_file():
        for name, low in load_file(directory / RESIDUAL).items():
            values[name] += low.float()
    stacked = stack(values, TINY)
    return {name: value.to(device).requires_grad_() for name, value in stacked.items()}
