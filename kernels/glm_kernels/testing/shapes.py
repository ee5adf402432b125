"""The table of shapes. Tests and benchmarks take their sizes from here and nowhere else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """A paged scoring and selection problem. Lengths in positions, the new ones included."""

    name: str
    lengths: tuple[int, ...]
    next_n: int
    num_heads: int = 32
    topk: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """A sparse MLA problem: ``num_tokens`` rows over a cache of ``num_slots``."""

    name: str
    num_tokens: int
    num_heads: int
    topk: int
    num_slots: int
    shared: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkShape:
    """A selection problem over ``[num_tokens, width]`` logits."""

    name: str
    num_tokens: int
    width: int
    topk: int


TINY_INDEXER = (
    IndexerShape(name="one", lengths=(1,), next_n=1, num_heads=2, topk=4),
    IndexerShape(name="page-1", lengths=(63,), next_n=1, num_heads=2, topk=8),
    IndexerShape(name="page", lengths=(64,), next_n=2, num_heads=2, topk=8),
    IndexerShape(name="page+1", lengths=(65,), next_n=1, num_heads=4, topk=16),
    IndexerShape(name="idle-rows", lengths=(0, 70, -4, 1), next_n=1, num_heads=4, topk=8),
    IndexerShape(name="verify", lengths=(6, 129, 3, 200), next_n=6, num_heads=4, topk=16),
)

CORNER_INDEXER = (
    IndexerShape(name="lengths", lengths=(0, 1, -4, 63, 64, 65, 127, 128, 129), next_n=1),
    IndexerShape(name="verify-corner", lengths=(6, 0, 5, 64, 69, 70, 133, 2051), next_n=6),
    IndexerShape(name="topk-edge", lengths=(2047, 2048, 2049, 2050), next_n=2),
    IndexerShape(name="heads-64", lengths=(333, 1000), next_n=3, num_heads=64),
    IndexerShape(name="batch-37", lengths=tuple(range(40, 40 + 37 * 61, 61)), next_n=4),
)

MODEL_INDEXER = (
    IndexerShape(name="b8-4k", lengths=(4096,) * 8, next_n=1),
    IndexerShape(name="b8-32k-verify", lengths=(32768,) * 8, next_n=6),
    IndexerShape(name="ragged", lengths=(100, 70_000, 9000, 33_000), next_n=6),
)

BENCH_INDEXER = (
    IndexerShape(name="1x32k n1", lengths=(32_768,), next_n=1),
    IndexerShape(name="32x32k n6", lengths=(32_768,) * 32, next_n=6),
    IndexerShape(name="32x128k n1", lengths=(131_072,) * 32, next_n=1),
    IndexerShape(name="8x128k n6", lengths=(131_072,) * 8, next_n=6),
    IndexerShape(name="32x128k n6", lengths=(131_072,) * 32, next_n=6),
    IndexerShape(name="1x1M n1", lengths=(1_048_576,), next_n=1),
    IndexerShape(name="8x1M n6", lengths=(1_048_576,) * 8, next_n=6),
)

TINY_MLA = (
    MlaShape(name="one-row", num_tokens=1, num_heads=1, topk=1, num_slots=8),
    MlaShape(name="few", num_tokens=3, num_heads=2, topk=9, num_slots=40),
    MlaShape(name="wide", num_tokens=5, num_heads=4, topk=70, num_slots=64),
)

CORNER_MLA = (
    MlaShape(name="heads-8", num_tokens=3, num_heads=8, topk=2048, num_slots=9000),
    MlaShape(name="heads-16", num_tokens=37, num_heads=16, topk=2048, num_slots=9000),
    MlaShape(name="heads-32", num_tokens=5, num_heads=32, topk=513, num_slots=9000),
    MlaShape(name="heads-64", num_tokens=33, num_heads=64, topk=2048, num_slots=9000),
    MlaShape(name="narrow", num_tokens=4, num_heads=64, topk=17, num_slots=100),
)

BENCH_MLA = (
    MlaShape(name="h64 T1", num_tokens=1, num_heads=64, topk=2048, num_slots=1 << 18),
    MlaShape(name="h64 T8", num_tokens=8, num_heads=64, topk=2048, num_slots=1 << 18),
    MlaShape(name="h64 T32", num_tokens=32, num_heads=64, topk=2048, num_slots=1 << 20),
    MlaShape(name="h64 T192", num_tokens=192, num_heads=64, topk=2048, num_slots=1 << 20),
    MlaShape(name="h8 T1", num_tokens=1, num_heads=8, topk=2048, num_slots=1 << 18),
    MlaShape(name="h8 T32", num_tokens=32, num_heads=8, topk=2048, num_slots=1 << 20),
    MlaShape(name="h8 T192", num_tokens=192, num_heads=8, topk=2048, num_slots=1 << 20),
)

VERIFY_MLA = (
    MlaShape(name="h8 32x6", num_tokens=192, num_heads=8, topk=2048, num_slots=1 << 20, shared=6),
    MlaShape(name="h64 32x6", num_tokens=192, num_heads=64, topk=2048, num_slots=1 << 20, shared=6),
)

PREFILL_MLA = (
    MlaShape(name="h64 8192", num_tokens=8192, num_heads=64, topk=2048, num_slots=131_072),
)

TINY_TOPK = (
    TopkShape(name="k-above-width", num_tokens=3, width=5, topk=9),
    TopkShape(name="k-equals-width", num_tokens=3, width=8, topk=8),
    TopkShape(name="sort-path", num_tokens=4, width=130, topk=16),
    TopkShape(name="threshold-path", num_tokens=5, width=1300, topk=64),
    TopkShape(name="threshold-full", num_tokens=3, width=700, topk=2048),
)

CORNER_TOPK = (
    TopkShape(name="below-k", num_tokens=3, width=2047, topk=2048),
    TopkShape(name="at-k", num_tokens=3, width=2048, topk=2048),
    TopkShape(name="above-k", num_tokens=37, width=2049, topk=2048),
    TopkShape(name="plateau", num_tokens=8, width=8320, topk=2048),
    TopkShape(name="long", num_tokens=6, width=200_000, topk=2048),
    TopkShape(name="small-k", num_tokens=5, width=5000, topk=7),
)
