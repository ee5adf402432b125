"""`/release_memory_occupation` and `/resume_memory_occupation` on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def release_memory_occupation(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND hook: SGLang's form, which at its end waits for the device that serves.

    It asks torch for its accelerator, and a torch that was built with CUDA names CUDA even where
    there is no such device. What is released already is left alone: SGLang would save weights that are
    gone.
    """
    asked = dict.fromkeys(recv_req.tags or GPU_MEMORY_ALL_TYPES)
    tags = [tag for tag in asked if tag not in self.offload_tags]
    if not tags:
        return ReleaseMemoryOccupationReqOutput()
    recv_req.tags = tags
    stock = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu  # type: ignore[assignment]
    try:
        return original(self, recv_req)
    finally:
        torch.get_device_module = stock


def resume_memory_occupation(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND hook: SGLang's form, of what was released; it raises on what was not, which ends the server."""
    asked = dict.fromkeys(recv_req.tags or GPU_MEMORY_ALL_TYPES)
    tags = [tag for tag in asked if tag in self.offload_tags]
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    recv_req.tags = tags
    return original(self, recv_req)
