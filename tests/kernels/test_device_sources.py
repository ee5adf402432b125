"""Device sources compile for sm_90a without a GPU.

| test | catches |
| --- | --- |
| every source compiles | an error that only the first launch on a GPU would show |
| capability is a table | an op that claims a GPU it has no code for |
"""

import pytest
from glm_kernels import _arch, _jit, _wgmma
from glm_kernels.attention.sparse_mla_sm90 import packed_prelude

SCORING = (("NUM_HEADS", 32), ("NEXT_N", 6), ("GROUPS", 1), ("TOKENS", 6), ("STAGES", 3))
PAIRED = (("NUM_HEADS", 64), ("NEXT_N", 6), ("GROUPS", 4), ("TOKENS", 2), ("STAGES", 4))
BF16 = _wgmma.wgmma_half(64, "bf16", False) + _wgmma.wgmma_half(256, "bf16", True)


def packed_source(rows: int, members: int) -> tuple[str, tuple[tuple[str, int], ...], str]:
    return "sparse_mla_packed", (("ROWS", rows), ("MEMBERS", members)), packed_prelude(rows)


def scoring_prelude(columns: int) -> str:
    define = f"#define WGMMA_FP8 wgmma_fp8_n{columns}\n"
    return _wgmma.wgmma_fp8(columns) + define + _jit.header("order")


SOURCES = [
    ("paged_mqa_logits", (*SCORING, ("MIN_BLOCKS", 4)), scoring_prelude(192)),
    ("paged_mqa_logits", (*PAIRED, ("MIN_BLOCKS", 2)), scoring_prelude(128)),
    ("topk_indices", (("CAPACITY", 8192),), _jit.header("order") + _jit.header("block_sort")),
    ("sparse_mla", (), BF16),
    packed_source(64, 0),
    packed_source(48, 1),
    ("combine_splits", (("HALF", 1), ("AT_ONCE", 16)), ""),
    ("sparse_mla_few_heads", (("CLUSTER", 4), ("STAGES", 2)), ""),
    ("union_slots", (("SIZE", 16384),), _jit.header("order") + _jit.header("block_sort")),
]


@pytest.mark.parametrize(("name", "defines", "prelude"), SOURCES, ids=lambda v: str(v)[:40])
def test_source_compiles(name: str, defines: tuple[tuple[str, int], ...], prelude: str) -> None:
    cubin = _jit.compile_source(_jit.assemble(name, defines, prelude))
    assert cubin[:4] == b"\x7fELF"


def test_a_broken_source_shows_the_compilers_log() -> None:
    with pytest.raises(RuntimeError, match="undefined"):
        _jit.compile_source('extern "C" __global__ void k() { nothing(); }')


def test_capability_is_a_table() -> None:
    assert _arch.supported("sparse_mla", (9, 0))
    assert not _arch.supported("sparse_mla", (8, 0))
    assert not _arch.supported("no_such_op", (9, 0))
