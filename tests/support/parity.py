"""Sets a running server's log-probabilities against transformers'."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_glm.verification.compare import (
    Comparison,
    compare_logprobs,
    merge_comparisons,
    parse_generate,
)
from sglang_glm.verification.decided import decided_prompt
from sglang_glm.verification.prompts import ordinary_vocab, random_prompt
from sglang_glm.verification.reference_cache import ReferenceCache
from tests.support.cache import cache_directory

if TYPE_CHECKING:
    from sglang_glm.verification.formats import CacheFormats
    from tests.support.server import Server

#: The published bound of truth mode, FP32 rounding over eight layers, and the share of rows behind a
#: near-tie that a test may leave out.
MAX_DIFF, MAX_EXCUSED = 1e-5, 0.02


@functools.cache
def reference(checkpoint: str, formats: CacheFormats | None = None) -> ReferenceCache:
    """The oracle of a checkpoint; its runs are kept on disk."""
    return ReferenceCache(Path(checkpoint), cache_directory() / "oracle", formats=formats)


def prompt(server: Server, length: int, seed: int) -> list[int]:
    """A prompt of ordinary tokens for the server's checkpoint."""
    return random_prompt(ordinary_vocab(Path(server.spec.model)), length, seed)


def clean_prompt(server: Server, length: int) -> list[int]:
    """The first prompt of this length, by seed, in which the oracle's selections have no near-tie."""
    for seed in range(20):
        ids = prompt(server, length, seed)
        if reference(server.spec.model).run(ids).first_near_tie() is None:
            return ids
    raise RuntimeError(
        f"20 prompts of {length} tokens all have near-ties; widen the checkpoint's scores"
    )


def stable_prompt(server: Server, length: int, formats: CacheFormats) -> list[int]:
    """The first prompt, by seed, whose FP8 roundings no FP32 rounding can tip over."""
    oracle = reference(server.spec.model, formats).oracle
    ids = decided_prompt(oracle, ordinary_vocab(Path(server.spec.model)), length)
    if ids is None:
        raise RuntimeError(f"20 prompts of {length} tokens all depend on FP32 rounding")
    return ids


def compare(
    server: Server, answer: dict, input_ids: list[int], formats: CacheFormats | None = None
) -> Comparison:
    """Compare one answer of `/generate`, prompt and output, with the oracle on the same tokens."""
    token_ids = [*input_ids, *answer["output_ids"]]
    run = reference(server.spec.model, formats).run(token_ids)
    got = parse_generate(answer["meta_info"], prompt_length=len(input_ids))
    return compare_logprobs(got, run.logprobs, run.token_ids, run.first_near_tie())


def compare_all(
    server: Server,
    prompts: list[list[int]],
    formats: CacheFormats | None = None,
    **sampling: object,
) -> Comparison:
    """Send `prompts` as one batch and compare every answer."""
    answers = server.generate(prompts, **sampling)
    return merge_comparisons(
        compare(server, answer, ids, formats) for answer, ids in zip(answers, prompts, strict=True)
    )


def check(comparison: Comparison, max_diff: float = MAX_DIFF) -> None:
    """Fail with every limit that a comparison breaks."""
    broken = comparison.failures(max_diff=max_diff, max_excused_fraction=MAX_EXCUSED)
    assert not broken, "; ".join(broken)


def check_steps(model: str, prompts: list[list[int]], steps: list[torch.Tensor]) -> None:
    """Hold the logits of a prefill and of the decode steps after it against the oracle, within `MAX_DIFF`.

    Args:
        model: The checkpoint.
        prompts: One a request; no selection of theirs may be a near-tie.
        steps: `[requests, vocab]` each; a step is fed the likeliest token of the one before.
    """
    logprobs = [step.log_softmax(-1) for step in steps]
    for request, ids in enumerate(prompts):
        said = [int(step[request].argmax()) for step in logprobs]
        expected = reference(model).run([*ids, *said[:-1]])
        assert expected.first_near_tie() is None
        got = torch.stack([step[request] for step in logprobs])
        torch.testing.assert_close(got, expected.logprobs[len(ids) - 1 :], atol=MAX_DIFF, rtol=0)
