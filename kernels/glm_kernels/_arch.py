"""What the device can do, as data."""

import functools
import os

import torch

# Op -> compute capabilities for which device code exists. Anything else takes the torch form.
_DEVICE_CODE: dict[str, frozenset[tuple[int, int]]] = {
    "paged_mqa_logits": frozenset({(9, 0)}),
    "topk_indices": frozenset({(9, 0)}),
    "paged_mqa_topk": frozenset({(9, 0)}),
    "sparse_mla": frozenset({(9, 0)}),
    "union_slots": frozenset({(9, 0)}),
}


def supported(op: str, capability: tuple[int, int]) -> bool:
    """Whether ``op`` has device code for this compute capability.

    Args:
        op: name of a public op.
        capability: major and minor compute capability.

    Returns:
        True when the op runs its own kernel there.
    """
    return capability in _DEVICE_CODE.get(op, frozenset())


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def sm_count(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def has_fp8(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a GPU with e4m3 matrix units (compute capability 8.9 and later).

    ``GLM_KERNELS_BACKEND=torch`` makes it False.
    """
    if tensor.device.type != "cuda" or os.environ.get("GLM_KERNELS_BACKEND") == "torch":
        return False
    return _capability(tensor.device.index or 0) >= (8, 9)


def use_device_code(op: str, tensor: torch.Tensor) -> bool:
    """Whether this call takes the compiled kernel: a supported GPU, and not switched off.

    ``GLM_KERNELS_BACKEND=torch`` switches every compiled kernel off.
    """
    if tensor.device.type != "cuda" or os.environ.get("GLM_KERNELS_BACKEND") == "torch":
        return False
    return supported(op, _capability(tensor.device.index or 0))
