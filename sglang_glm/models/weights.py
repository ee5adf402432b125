"""Checks a checkpoint's tensors as SGLang loads them, and dequantises them where the CPU serves.

SGLang's loader skips a tensor it does not know with a warning and leaves a parameter that never
arrived at its random start. Both serve wrong text, so both are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from sglang_glm.checkpoint.fp8 import dequantize_blocks
from sglang_glm.checkpoint.tensors import model_tensors

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig

Tensors = Iterable[tuple[str, torch.Tensor]]

_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, _FP8)
_SCALE = re.compile(r"\.weight_scale(_inv)?$")
#: transformers writes the experts of a layer as two stacked tensors.
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")

#: Why a tensor that is none of a GLM checkpoint's cannot be served, by what its name holds.
_REFUSALS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"\.(qweight|qzeros|scales|g_idx)$"),
        "AWQ and GPTQ weights are not served; use a BF16 or FP8 checkpoint",
    ),
    (
        re.compile(r"\.weight_(packed|shape|zero_point)$"),
        "4-bit packed weights are not served; use a BF16 or FP8 checkpoint",
    ),
    (
        re.compile(r"(^|\.)rot\.weight$"),
        "an MTP layer with a rotation of its own is not served; remove --speculative-algorithm",
    ),
)


def required_tensors(config: GlmDsaConfig, *, is_nextn: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every BF16 tensor that the target, or the MTP layer, must find."""
    prefix = f"model.layers.{config.num_hidden_layers}."
    tensors = {tensor.name: tensor.shape for tensor in model_tensors(config)}
    return {name: shape for name, shape in tensors.items() if name.startswith(prefix) == is_nextn}


def optional_tensors(config: GlmDsaConfig) -> dict[str, tuple[int, ...]]:
    """Copies of the embedding and the head that some checkpoints carry under the MTP layer."""
    if config.mtp_layer_id is None:
        return {}
    shape = (config.vocab_size, config.hidden_size)
    prefix = f"model.layers.{config.mtp_layer_id}"
    return {f"{prefix}.embed_tokens.weight": shape, f"{prefix}.shared_head.head.weight": shape}


class CheckpointStream:
    """One pass over a checkpoint's tensors.

    Args:
        config: The model's facts.
        is_nextn: Whether the MTP layer is being loaded rather than the target.
        dequantize_to: With a dtype, FP8 block weights leave the stream in it and their scales do
            not leave at all; None passes both on.
    """

    def __init__(
        self, config: GlmDsaConfig, *, is_nextn: bool, dequantize_to: torch.dtype | None = None
    ) -> None:
        self._required = required_tensors(config, is_nextn=is_nextn)
        self._known = (
            self._required
            | required_tensors(config, is_nextn=not is_nextn)
            | optional_tensors(config)
        )
        self._dequantize_to = dequantize_to
        self._missing = set(self._required)
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def check(self, weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass `weights` on, each checked by name, shape and scale, and by value where the CPU serves.

        Raises:
            ValueError: a tensor is unknown, of another shape or dtype, FP8 without a scale, or holds
                NaN or infinity; names it.
        """
        for name, tensor in self._in_dtype(weights):
            # A GPU's server would wait minutes for a look at every value.
            if self._dequantize_to is not None and not torch.isfinite(tensor).all():
                raise ValueError(
                    f"checkpoint tensor {name} holds NaN or infinity, expected finite weights; the file is "
                    "damaged, or the training diverged"
                )
            yield name, tensor

    def _in_dtype(self, weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if _IGNORED.search(name):
                continue
            if _STACKED_EXPERTS.search(name):
                self._arrived_stacked(name, tensor)
                yield name, tensor
                continue
            weight_name = _SCALE.sub(".weight", name)
            self._check_known(name, weight_name)
            if name == weight_name:
                _check_shape(name, tensor, self._known[name])
                _check_dtype(name, tensor)
                self._missing.discard(name)
            if self._dequantize_to is None or not (name != weight_name or tensor.dtype == _FP8):
                yield name, tensor
                continue
            pair = self._waiting.setdefault(weight_name, {})
            pair["weight" if name == weight_name else "scale"] = tensor
            if len(pair) == 2:
                del self._waiting[weight_name]
                yield weight_name, _dequantize(weight_name, **pair).to(self._dequantize_to)
        if self._waiting:
            name, pair = next(iter(self._waiting.items()))
            lacking = "scale (weight_scale_inv)" if "weight" in pair else "weight"
            raise ValueError(
                f"checkpoint tensor {name} has no {lacking}; the file is damaged or cut short"
            )

    def check_complete(self) -> None:
        """Refuse a checkpoint that lacked a tensor.

        Raises:
            ValueError: names the first missing tensor and counts the others.
        """
        if not self._missing:
            return
        first = min(self._missing)
        others = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
        raise ValueError(
            f"checkpoint tensor {first}{others} is missing; "
            "check that every shard was downloaded and that config.json belongs to this checkpoint"
        )

    def _check_known(self, name: str, weight_name: str) -> None:
        if weight_name in self._known:
            return
        for pattern, reason in _REFUSALS:
            if pattern.search(name):
                raise ValueError(f"checkpoint tensor {name}: {reason}")
        raise ValueError(
            f"checkpoint tensor {name} belongs to no part of the model that config.json describes "
            "(a wrong layer count, or indexer weights on a shared layer); correct config.json"
        )

    def _arrived_stacked(self, name: str, tensor: torch.Tensor) -> None:
        prefix, kind = name.rsplit(".", 1)
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        arrived = {
            known
            for known in self._known
            if known.startswith(f"{prefix}.")
            and known.endswith(tuple(f".{part}_proj.weight" for part in parts))
        }
        self._check_known(name, min(arrived, default=name))
        rows, columns = self._known[min(arrived)]
        _check_shape(name, tensor, (len(arrived) // len(parts), rows * len(parts), columns))
        _check_dtype(name, tensor)
        self._missing -= arrived


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"checkpoint tensor {name} is {list(tensor.shape)}, expected {list(expected)} by config.json"
        )


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Codes of another format would be copied into the parameter as if they were values."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"checkpoint tensor {name} is {tensor.dtype}, expected one of "
            f"{', '.join(str(dtype) for dtype in _DTYPES)}; use a BF16 or FP8 checkpoint"
        )


def _dequantize(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    try:
        return dequantize_blocks(weight, scale)
    except ValueError as error:
        raise ValueError(
            f"checkpoint tensor {name}: {error}; use a checkpoint with one scale a block"
        ) from None
