"""What a GPU and its links can do, and where each number comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["hopper", "blackwell"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Ceilings of one GPU.

    Attributes:
        architecture: Decides which kernels SGLang chooses, and their row formats.
        memory_bytes: Capacity that CUDA reports, below the round number of GiB in the data sheet.
        hbm_bytes_per_s: Achievable memory bandwidth.
        bf16_flops_per_s: Achievable dense BF16 rate of the matrix units.
        fp8_flops_per_s: Achievable dense FP8 rate.
        link_bytes_per_s: One direction of the fast link to the other GPUs of the node.
        network_bytes_per_s: One direction of this GPU's share of the network between nodes.
        source: Where the ceilings come from.
    """

    name: str
    architecture: Architecture
    memory_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    source: str


GPUS: dict[str, Gpu] = {
    "h200": Gpu(
        name="h200",
        architecture="hopper",
        memory_bytes=int(139.80 * _GIB),
        hbm_bytes_per_s=4.3e12,
        bf16_flops_per_s=790e12,
        fp8_flops_per_s=1580e12,
        link_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        source="HBM copy and BF16 matrix rate measured on one H200, FP8 taken as twice BF16 "
        "(datasheet: 4.8 TB/s, 989 and 1979 TFLOP/s); NVLink 4 and one 400 Gb/s NIC per GPU from "
        "the datasheet",
    ),
    "h100": Gpu(
        name="h100",
        architecture="hopper",
        memory_bytes=int(79.18 * _GIB),
        hbm_bytes_per_s=3.0e12,
        bf16_flops_per_s=790e12,
        fp8_flops_per_s=1580e12,
        link_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        source="datasheet of the SXM part (3.35 TB/s) scaled by the share that the H200 reaches; "
        "same matrix units and links as the H200; not measured",
    ),
    "b200": Gpu(
        name="b200",
        architecture="blackwell",
        memory_bytes=int(178.35 * _GIB),
        hbm_bytes_per_s=7.2e12,
        bf16_flops_per_s=1800e12,
        fp8_flops_per_s=3600e12,
        link_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        source="datasheet (8 TB/s, 2250 and 4500 dense TFLOP/s, NVLink 5) scaled by the share that "
        "the H200 reaches; not measured",
    ),
}

COLLECTIVE_LATENCY_US = 5.0
"""Start-up time of one collective inside a node: the usual planning figure, not measured here."""

NETWORK_LATENCY_US = 15.0
"""Start-up time of one collective that leaves the node: planning figure, not measured here."""


def find_gpu(name: str) -> Gpu:
    """The ceilings of a known GPU.

    Raises:
        ValueError: Listing the known names.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ValueError(f"plan: gpu is {name!r}, expected one of {', '.join(GPUS)}")
    return gpu
