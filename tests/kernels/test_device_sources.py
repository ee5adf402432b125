"""Device sources compile for sm_90a without a GPU.

| test | catches |
| --- | --- |
| every source compiles | an error that only the first launch on a GPU would show |
| capability is a table | an op that claims a GPU it has no code for |
"""

import pytest
from glm_kernels import _arch, _jit, _wgmma
from glm_kernels.attention.sparse_mla_sm90 import packed_prelude
from glm_kernels.indexer.paged_mqa_logits_sm90 import source

BF16 = _wgmma.wgmma_half(64, "bf16", False) + _wgmma.wgmma_half(256, "bf16", True)


def packed_source(rows: int, members: int) -> tuple[str, tuple[tuple[str, int], ...], str]:
    return "sparse_mla_packed", (("ROWS", rows), ("MEMBERS", members)), packed_prelude(rows)


SOURCES = [
    ("paged_mqa_logits", *source(num_heads=32, next_n=1)),
    ("paged_mqa_logits", *source(num_heads=32, next_n=6)),
    ("paged_mqa_logits", *source(num_heads=64, next_n=6)),
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
