"""The driver's descriptions of tensors, from which device code copies boxes in bulk."""

from __future__ import annotations

import ctypes
import functools

from glm_kernels._jit import check_driver, driver

_BYTES = 128  # of a CUtensorMap
_ALIGNMENT = 64
# CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion and
# CUtensorMapFloatOOBfill.
_UINT8, _NO_INTERLEAVE, _SWIZZLE_128, _NO_PROMOTION, _ZEROS = 0, 0, 3, 0, 0


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """Map of a byte tensor, for copies that swizzle rows of 128 bytes in shared memory.

    Args:
        address: of the first byte, a multiple of 16.
        sizes: of each dimension, the contiguous one first.
        strides: in bytes, of every dimension but the first; multiples of 16.
        box: sizes of what one copy takes.

    Returns:
        The ``CUtensorMap``, which kernels take by value.

    Raises:
        RuntimeError: when the driver refuses the sizes.
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _UINT8,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        _NO_INTERLEAVE,
        _SWIZZLE_128,
        _NO_PROMOTION,
        _ZEROS,
    )
    check_driver("cuTensorMapEncodeTiled", status)
    return ctypes.string_at(aligned, _BYTES)
