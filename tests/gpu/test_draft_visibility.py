"""Whether draft steps on CUDA see the tokens drafted before them; docs/mtp.md says what to expect.

The checkpoint's MTP layer reads the row before its own. Its third draft and those after it are right
only if a step sees the row of the draft before it: five of five in every round if so, two in most
rounds if not. One server a run: stock SGLang, then this package.

    python -m pytest -m gpu -s tests/gpu/test_draft_visibility.py
"""

from __future__ import annotations

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.mtp_traffic import Request, accept_histogram, draft_args, prompt
from tests.support.server import ServerPool, ServerSpec

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.slow]

STEPS, NEW_TOKENS = 5, 61
FLAGS = (
    *draft_args(STEPS),
    *("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.5"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)
ENV = (
    ("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0"),
    ("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0"),
)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("package", ["stock", "ours"])
def test_drafts_that_read_the_row_before(
    pool: ServerPool, package: str, kv_cache_dtype: str
) -> None:
    model = checkpoint(
        *("--mtp", "--mtp-perfect", "attention", "--index-topk", "2048"),
        # Stock SGLang norms the MTP layer's input in a kernel that begins at 512 columns.
        *("--heads", "64", "--hidden-size", "512"),
    )
    env = (*ENV, ("SGLANG_GLM_ENABLE", "0" if package == "stock" else "1"))
    flags = (*FLAGS, "--kv-cache-dtype", kv_cache_dtype)
    if kv_cache_dtype == "bfloat16":
        # SGLang's choice for it on Hopper, FA3, is not in every installation.
        flags = (*flags, "--dsa-decode-backend", "flashmla_sparse")
    answer = Request(tuple(prompt(100, 3, vocab=512)), NEW_TOKENS).send(
        pool.get(ServerSpec(model, flags, env))
    )
    histogram = accept_histogram(answer, STEPS)
    print(f"\n{package} {kv_cache_dtype}: rounds by correct drafts {histogram}")
    # The first two drafts read rows that are verified: fewer is another fault.
    assert sum(histogram[:2]) <= 1, histogram
    if package == "ours":
        assert histogram[:STEPS] == [0] * STEPS, histogram
