"""How many queue pairs of network cards DeepEP's low-latency kernels believe they have.

They ask for one per local expert before anything is sent, and then write straight into the memory of
every peer that NVLink reaches. Without a card NVSHMEM has none, so they stop although none would be
used. Here the number that they check is read, and set on machines where NVLink reaches every peer.

It stands in NVSHMEM's device state, a constant of DeepEP's extension without a name that is exported:
its place is in the symbol table of the file.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

SYMBOL = b"nvshmemi_ibgda_device_state_d"
#: Of `nvshmemi_ibgda_device_state_v1` in NVSHMEM 3.4: its size, and two of its 32-bit fields.
STATE_BYTES, _PAIRS_A_PEER, _NUM_DEVICES = 8384, 28, 48
_TO_DEVICE, _FROM_DEVICE = 1, 2


def read() -> tuple[int, int]:
    """Queue pairs a peer, and cards, as the kernels of this process see them."""
    return _read_field(_PAIRS_A_PEER), _read_field(_NUM_DEVICES)


def set_without_cards(pairs_a_peer: int) -> None:
    """Let the kernels' check pass. Waiting for cards to finish then waits for none.

    Args:
        pairs_a_peer: At least the local experts.
    """
    _write_field(_PAIRS_A_PEER, pairs_a_peer)
    _write_field(_NUM_DEVICES, 0)


def find_symbol(path: Path, name: bytes) -> tuple[int, int]:
    """Offset from the load address, and size, of a symbol of a 64-bit shared object.

    Raises:
        LookupError: the file has no such symbol, or was stripped.
    """
    data = path.read_bytes()
    (sections_at,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + index * entry_bytes)
        for index in range(count)
    ]
    symbol_table = 2
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != symbol_table:
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, 24):
            name_at, _, _, _, value, length = struct.unpack_from("<IBBHQQ", data, at)
            end = names + name_at + len(name)
            if data[names + name_at : end] == name and data[end] == 0:
                return value, length
    raise LookupError(f"{path} has no symbol {name.decode()}")


def _host_address() -> int:
    import deep_ep._C

    path = Path(deep_ep._C.__file__).resolve()
    offset, size = find_symbol(path, SYMBOL)
    if size != STATE_BYTES:
        raise LookupError(f"NVSHMEM's state has {size} bytes, expected {STATE_BYTES}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    first = next(line for line in maps if line.endswith(str(path)))
    return int(first.split("-")[0], 16) + offset


def _copy(call: str, *arguments: object) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    code = getattr(runtime, call)(*arguments)
    if code:
        raise RuntimeError(f"{call} returned {code}")


def _read_field(offset: int) -> int:
    value = ctypes.c_int32()
    _copy(
        "cudaMemcpyFromSymbol",
        ctypes.byref(value),
        ctypes.c_void_p(_host_address()),
        ctypes.c_size_t(4),
        ctypes.c_size_t(offset),
        _FROM_DEVICE,
    )
    return value.value


def _write_field(offset: int, value: int) -> None:
    _copy(
        "cudaMemcpyToSymbol",
        ctypes.c_void_p(_host_address()),
        ctypes.byref(ctypes.c_int32(value)),
        ctypes.c_size_t(4),
        ctypes.c_size_t(offset),
        _TO_DEVICE,
    )
