"""Index math of the Triton scoring kernel, through Triton's interpreter on the CPU.

| test | catches |
| --- | --- |
| equals fp64 loop over poisoned, shuffled pages | page arithmetic, a mask one off, a read past a length |
| nothing past the lengths is written (T06) | stores without a bound |
"""

import importlib
from types import ModuleType

import pytest
import torch
from glm_kernels.indexer.paged_mqa_logits_ref import paged_mqa_logits_ref
from glm_kernels.testing.generate import paged_indexer
from glm_kernels.testing.numeric import assert_logits
from glm_kernels.testing.poison import poison_unused_pages
from glm_kernels.testing.shapes import TINY_INDEXER, IndexerShape


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = importlib.import_module("glm_kernels.indexer.paged_mqa_logits_triton")
    # The decorator decides between compiler and interpreter when the module is executed.
    return importlib.reload(module)


@pytest.mark.parametrize("shape", TINY_INDEXER, ids=lambda s: s.name)
def test_equals_loop(shape: IndexerShape, interpreted: ModuleType) -> None:
    p = paged_indexer(shape)
    pages = poison_unused_pages(p.index_cache, p.cache_seqlens, p.block_table)
    rest = (p.weights, p.cache_seqlens, p.block_table)
    got = torch.full((len(shape.lengths) * shape.next_n, p.max_context), float("-inf"))
    interpreted.paged_mqa_logits_triton(p.q, pages, *rest, got)
    want = paged_mqa_logits_ref(p.q, p.index_cache, *rest, p.max_context, dtype=torch.float64)
    assert_logits(got, want, f"triton {shape.name}", 1e-10)


def test_nothing_past_the_lengths_is_written(interpreted: ModuleType) -> None:
    shape = IndexerShape(name="bounds", lengths=(0, 70, -4, 1), next_n=2, num_heads=2)
    p = paged_indexer(shape)
    out = torch.full((8, p.max_context), 123.0)
    interpreted.paged_mqa_logits_triton(
        p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table, out
    )
    written = (out != 123.0).sum(1).tolist()
    assert written == [0, 0, 69, 70, 0, 0, 0, 1]
