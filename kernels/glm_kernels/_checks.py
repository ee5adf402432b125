"""Argument checks whose messages carry the op, the argument, what came and what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8_DTYPE = torch.float8_e4m3fn
INT_DTYPES = (torch.int32, torch.int64)


class Dims:
    """Shape checker of one call: a named size must be the same wherever it appears.

    ``Dims("op").check("q", q, ("num_tokens", 32, 128), (torch.float32,))`` binds ``num_tokens`` on
    first sight and compares it on later ones.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.device: torch.device | None = None

    def check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: Sequence[int | str],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Raise unless ``tensor`` has this shape, one of these dtypes and the call's device.

        Args:
            name: argument name for the message.
            tensor: the argument.
            shape: one entry a dimension: a size, or the name of a size.
            dtypes: accepted dtypes.

        Raises:
            ValueError: on any mismatch; the message names op, argument, got and expected.
        """
        wanted = [f"{d}={self.sizes[d]}" if d in self.sizes else str(d) for d in shape]
        expected = f"[{', '.join(wanted)}] {' or '.join(str(d)[6:] for d in dtypes)}"
        got = f"{list(tensor.shape)} {str(tensor.dtype)[6:]} on {tensor.device}"
        ok = tensor.dim() == len(shape) and tensor.dtype in dtypes
        if ok:
            for want, size in zip(shape, tensor.shape, strict=True):
                ok = ok and size == (
                    self.sizes.setdefault(want, size) if isinstance(want, str) else want
                )
        if not ok:
            raise ValueError(f"{self.op}: {name} is {got}, expected {expected}")
        if self.device is None:
            self.device = tensor.device
        elif tensor.device != self.device:
            raise ValueError(
                f"{self.op}: {name} is on {tensor.device}, expected {self.device} like the other "
                "arguments; move it there"
            )

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]


def require(op: str, condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the op's name in front unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{op}: {message}")
