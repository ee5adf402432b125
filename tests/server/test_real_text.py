"""This repository's own documents, 20,000 tokens and more, in chunks with a prefix hit.

The second request finds its prefix in the cache; both answers are identical in truth mode.
"""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.server import Server, ServerSpec
from tests.support.specs import TRUTH_64

pytestmark = pytest.mark.slow
SERVER = ServerSpec(
    TRUTH_64.model,
    ("--dtype", "float32", "--chunked-prefill-size", "2048", "--max-total-tokens", "32768"),
    env=(("OMP_NUM_THREADS", str(os.cpu_count())),),
)

ROOT = Path(__file__).parents[2]


#: More than the 20,000 that make it a long text, less than the pool holds.
TOKENS = 24_000


def document(checkpoint: str) -> list[int]:
    files = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    text = "\n\n".join(file.read_text() for file in files)
    return AutoTokenizer.from_pretrained(checkpoint)(text).input_ids[:TOKENS]


def test_real_text(server: Server) -> None:
    server.flush_cache()
    body = {
        "input_ids": document(server.spec.model),
        "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
    }
    cold = server.post("/generate", **body).json()
    assert cold["meta_info"]["prompt_tokens"] == TOKENS, "the documents have become shorter"
    assert cold["meta_info"]["cached_tokens"] == 0
    warm = server.post("/generate", **body).json()
    assert warm["meta_info"]["cached_tokens"] >= cold["meta_info"]["prompt_tokens"] // 64 * 64 - 64
    assert warm["output_ids"] == cold["output_ids"]
