"""Prefill context parallelism without CUDA streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def execute_extend_cp(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: run a divided prefill where CUDA has no stream to name.

    SGLang hands the current stream to gathers of rows in turn, which do not look at it.
    """
    stock = torch.cuda.current_stream
    torch.cuda.current_stream = _no_stream
    try:
        return original(*args, **kwargs)
    finally:
        torch.cuda.current_stream = stock


def _no_stream(device: Any = None) -> Any:
    return None
