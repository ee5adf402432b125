"""Index math of the Triton scoring kernel, through Triton's interpreter on the CPU.

| test | catches |
| --- | --- |
| equals fp64 loop over poisoned, shuffled pages | page arithmetic, a mask one off, a read past a length |
| nothing past the lengths is written (T06) | stores without a bound |

Triton decides between compiler and interpreter when it is first imported, and other tests import it
too: so these run in a process of their own, which `test_in_the_interpreter` starts on this file.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from glm_kernels.indexer.paged_mqa_logits_ref import paged_mqa_logits_ref
from glm_kernels.testing.generate import paged_indexer
from glm_kernels.testing.numeric import assert_logits
from glm_kernels.testing.poison import poison_unused_pages
from glm_kernels.testing.shapes import TINY_INDEXER, IndexerShape

if os.environ.get("TRITON_INTERPRET") == "1":
    from glm_kernels.indexer.paged_mqa_logits_triton import paged_mqa_logits_triton

    @pytest.mark.parametrize("shape", TINY_INDEXER, ids=lambda s: s.name)
    def test_equals_loop(shape: IndexerShape) -> None:
        p = paged_indexer(shape)
        pages = poison_unused_pages(p.index_cache, p.cache_seqlens, p.block_table)
        rest = (p.weights, p.cache_seqlens, p.block_table)
        got = torch.full((len(shape.lengths) * shape.next_n, p.max_context), float("-inf"))
        paged_mqa_logits_triton(p.q, pages, *rest, got)
        want = paged_mqa_logits_ref(p.q, p.index_cache, *rest, p.max_context, dtype=torch.float64)
        assert_logits(got, want, f"triton {shape.name}", 1e-10)

    def test_nothing_past_the_lengths_is_written() -> None:
        shape = IndexerShape(name="bounds", lengths=(0, 70, -4, 1), next_n=2, num_heads=2)
        p = paged_indexer(shape)
        out = torch.full((8, p.max_context), 123.0)
        paged_mqa_logits_triton(p.q, p.index_cache, p.weights, p.cache_seqlens, p.block_table, out)
        written = (out != 123.0).sum(1).tolist()
        assert written == [0, 0, 69, 70, 0, 0, 0, 1]

else:

    def test_in_the_interpreter() -> None:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stdout[-4000:]
        passed = re.search(r"(\d+) passed", result.stdout)
        assert passed and int(passed[1]) == len(TINY_INDEXER) + 1, result.stdout[-400:]
