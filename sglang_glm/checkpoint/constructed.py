"""Chooses the tensors that a spec constructs instead of drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.perfect_mtp import build_perfect_mtp, digit_tables, live_codes
from sglang_glm.checkpoint.script import script_target
from sglang_glm.checkpoint.trigram import TrigramBuilder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sglang_glm.checkpoint.spec import CheckpointSpec


def build_constructed(spec: CheckpointSpec, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Build the tensors that differ from the random ones.

    Args:
        spec: Any spec.
        tokenizer: The checkpoint's.

    Returns:
        Name to BF16 tensor; empty unless ``spec.is_constructed``.

    Raises:
        ValueError: If the script cannot be followed.
    """
    if not spec.is_constructed:
        return {}
    build = TrigramBuilder(spec)
    if spec.script:
        build.target(*script_target(tokenizer, spec))
    else:
        build.target(live_codes(spec), digit_tables(spec))
    if spec.mtp_perfect != "no":
        build_perfect_mtp(build)
    nextn = f"model.layers.{spec.num_hidden_layers}"
    for copy, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if f"{nextn}.{copy}.weight" in build.table:
            build.built[f"{nextn}.{copy}.weight"] = build.built[f"{source}.weight"]
    return {name: tensor.to(torch.bfloat16) for name, tensor in build.built.items()}
