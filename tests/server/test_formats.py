"""Number formats of weights and caches, each against transformers with the same rounding.

test_bf16              BF16 weights, latents and index keys: error against FP32 truth, beside transformers' own
test_fp8_cache         656-byte rows and 8,448-byte index pages under FP32 arithmetic
test_fp8_weights       128x128 blocks, with parts kept in BF16: equal to the dequantised weights
"""

from pathlib import Path

import pytest
import torch

from sglang_glm.verification.compare import merge_comparisons, parse_generate
from sglang_glm.verification.formats import CacheFormats
from sglang_glm.verification.oracle import Oracle
from tests.support.parity import check, clean_prompt, compare, reference, stable_prompt
from tests.support.server import Server
from tests.support.specs import BF16_8, FP8_CACHE_8, FP8_WEIGHTS_8

FP8_CACHES = CacheFormats(latent="fp8", index_key="fp8", index_query="fp8")
LENGTHS = (5, 40, 130)


@pytest.mark.parametrize("server", [BF16_8], indirect=True, ids=["bf16"])
def test_bf16(server: Server) -> None:
    truth = reference(server.spec.model)
    rounded = Oracle(Path(server.spec.model), dtype=torch.bfloat16)
    ours, theirs = [], []
    for length in LENGTHS:
        ids = clean_prompt(server, length)
        answer = server.generate(ids)
        token_ids = [*ids, *answer["output_ids"]]
        expected = truth.run(token_ids).logprobs
        got = parse_generate(answer["meta_info"], prompt_length=length)
        at = expected[got.rows].gather(1, got.token_ids[:, None])[:, 0]
        ours.append((got.token_logprobs - at).abs())
        hf = rounded.run(token_ids).logprobs.float()
        theirs.append((hf[got.rows].gather(1, got.token_ids[:, None])[:, 0] - at).abs())
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    assert ours.mean() <= 1.5 * theirs.mean(), (ours.mean(), theirs.mean())


@pytest.mark.parametrize("server", [FP8_CACHE_8], indirect=True, ids=["fp8_cache"])
def test_fp8_cache(server: Server) -> None:
    prompts = [stable_prompt(server, length, FP8_CACHES) for length in (5, 8, 9, 24, 40)]
    total = merge_comparisons(
        compare(server, answer, ids, FP8_CACHES)
        for answer, ids in zip(server.generate(prompts), prompts, strict=True)
    )
    check(total, max_diff=2e-3)


@pytest.mark.parametrize("server", [FP8_WEIGHTS_8], indirect=True, ids=["fp8_weights"])
def test_fp8_weights(server: Server) -> None:
    prompts = [clean_prompt(server, length) for length in LENGTHS]
    total = merge_comparisons(
        compare(server, answer, ids)
        for answer, ids in zip(server.generate(prompts), prompts, strict=True)
    )
    check(total)
