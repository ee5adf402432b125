"""`/release_memory_occupation` on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def release_memory_occupation(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND hook: SGLang's form, which at its end waits for the device that serves.

    It asks torch for its accelerator, and a torch that was built with CUDA names CUDA even where
    there is no such device.
    """
    stock = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu  # type: ignore[assignment]
    try:
        return original(self, recv_req)
    finally:
        torch.get_device_module = stock
