"""The block-FP8 weight format of the released GLM-5.x FP8 checkpoints, written and read back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from sglang_glm.config import FP8_BLOCK

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec

FP8_MAX = 448.0
"""Largest finite e4m3 value."""

_LINEAR = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj"
    r"|wq_b|wk|gate_proj|up_proj|down_proj)\.weight$"
)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to e4m3 with one scale per 128 x 128 block.

    Args:
        weight: ``[rows, columns]``, floating point. Edge blocks may be smaller.

    Returns:
        ``weight_fp8``, ``[rows, columns]`` e4m3, and ``weight_scale_inv``,
        ``[ceil(rows / 128), ceil(columns / 128)]`` FP32. Despite its name the scale is multiplied
        by when reading: ``weight ~= weight_fp8 * scale``.

    Raises:
        ValueError: If ``weight`` is not a matrix.
    """
    if weight.ndim != 2:
        raise ValueError(
            f"quantize_blocks: weight has shape {list(weight.shape)}, expected [rows, columns]"
        )
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(
        weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    )
    blocks = padded.view(
        padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK
    )
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX  # [row blocks, column blocks]
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view_as(padded)[:rows, :columns].contiguous(), scale


def dequantize_blocks(weight_fp8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Undo :func:`quantize_blocks`.

    Args:
        weight_fp8: ``[rows, columns]``, e4m3.
        scale: ``[ceil(rows / 128), ceil(columns / 128)]``, the stored ``weight_scale_inv``.

    Returns:
        ``[rows, columns]``, FP32.

    Raises:
        ValueError: If the scale does not cover the weight.
    """
    rows, columns = weight_fp8.shape
    expected = [-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]
    if list(scale.shape) != expected:
        raise ValueError(
            f"dequantize_blocks: scale is {list(scale.shape)} for a weight of "
            f"{[rows, columns]}, expected {expected}"
        )
    per_element = scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight_fp8.float() * per_element[:rows, :columns]


def is_quantized(spec: CheckpointSpec, name: str) -> bool:
    """Whether tensor ``name`` is stored as FP8.

    Args:
        spec: The checkpoint's spec.
        name: Full tensor name, ending in ``.weight`` for linear layers.

    Returns:
        True for the linear layers of the decoder and MTP layers, less the parts that every
        released checkpoint keeps in BF16 (router, ``weights_proj``, ``eh_proj``, norms) and less
        ``spec.fp8_exclude``.
    """
    if not spec.fp8 or not _LINEAR.search(name):
        return False
    parts = {
        "attention": ".self_attn." in name and ".indexer." not in name,
        "indexer": ".indexer." in name,
        "shared_experts": ".shared_experts." in name,
        "nextn": name.startswith(f"model.layers.{spec.num_hidden_layers}."),
    }
    return not any(parts[part] for part in spec.fp8_exclude)


def quantization_config(spec: CheckpointSpec) -> dict[str, Any]:
    """Build ``quantization_config`` in the released checkpoints' form.

    Args:
        spec: The checkpoint's spec; ``fp8`` is assumed.

    Returns:
        A dict with every unquantised module under ``modules_to_not_convert``.

    Notes:
        The released configs call the head-weight projection ``self_attn.indexers_proj`` although
        the tensor is ``self_attn.indexer.weights_proj``. A loader that trusts the list alone would
        look for a scale that is not there, so the misnomer is reproduced.
    """
    from sglang_glm.checkpoint.tensors import iter_tensors

    modules: dict[str, None] = {}
    for tensor in iter_tensors(spec):
        if is_quantized(spec, tensor.name):
            continue
        module = tensor.name.removesuffix(".weight").removesuffix(".bias")
        module = module.replace(".indexer.weights_proj", ".indexers_proj")
        modules[module] = None
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": list(modules),
    }
