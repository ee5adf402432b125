"""What docs/mtp.md says about SGLang's own draft steps on CUDA, read from its source.

A failure means that SGLang has changed: read it again and correct the page.
"""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnMultiStepBackend

_ATTENTION = "sglang.srt.layers.attention"


def reads_of(name: str, module: str) -> int:
    """How often a module, which may need a GPU to import, reads the attribute `name`."""
    spec = importlib.util.find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text())
    return sum(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def test_no_plan_of_the_dsa_backend_asks_for_its_step() -> None:
    for module in (
        "dsa_backend",
        "dsa.dsa_backend_mtp_precompute",
        "dsa.dsa_metadata_manager",
    ):
        assert reads_of("speculative_step_id", f"{_ATTENTION}.{module}") == 0, module
    # Or the count would not tell: the dense backend's plan adds the step to the length.
    assert reads_of("speculative_step_id", f"{_ATTENTION}.flashattention_backend") > 0


def test_every_step_is_planned_from_one_batch() -> None:
    planned = []
    backend = object.__new__(DeepseekSparseAttnMultiStepBackend)
    backend.speculative_num_steps = 4
    backend.attn_backends = [
        SimpleNamespace(
            init_forward_metadata=lambda batch, step=step: planned.append((step, batch))
        )
        for step in range(3)
    ]
    batch = SimpleNamespace(seq_lens=[7])
    backend.init_forward_metadata(batch)
    assert planned == [(0, batch), (1, batch), (2, batch)]
    assert batch.seq_lens == [7]
