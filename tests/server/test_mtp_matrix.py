"""The matrix behind `test_mtp.py`: step counts, index_topk, sharing, own weights, sampling."""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.chi_square import chi_square_p
from tests.support.mtp_checkpoints import NEVER_FROM, aligned, counting, ring
from tests.support.mtp_simulation import simulate
from tests.support.mtp_traffic import (
    WAVE,
    Request,
    accept_histogram,
    draft_args,
    prompt,
    together,
)
from tests.support.server import ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.slow]

BASE = ("--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "64")


def spec(model: str, steps: int = 0, *extra: str) -> ServerSpec:
    drafts = draft_args(steps) if steps else ()
    return ServerSpec(model=model, args=(*BASE, *drafts, *extra))


@pytest.fixture(scope="module")
def texts(pool: ServerPool) -> dict[int, list[list[int]]]:
    """Answers without drafts, by index_topk."""
    return {
        topk: [a["output_ids"] for a in together(pool.get(spec(aligned(topk))), WAVE)]
        for topk in (8, 64)
    }


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("index_topk", [8, 64])
def test_text_and_accepts(
    pool: ServerPool, texts: dict[int, list[list[int]]], index_topk: int, steps: int
) -> None:
    model = aligned(index_topk)
    answers = together(pool.get(spec(model, steps)), WAVE)
    assert [answer["output_ids"] for answer in answers] == texts[index_topk]
    for request, answer in zip(WAVE, answers, strict=True):
        expected = simulate(
            model, list(request.input_ids), request.max_new_tokens, steps, share=True
        )
        assert accept_histogram(answer, steps) == expected.histogram(steps)


def test_accepts_without_sharing(pool: ServerPool) -> None:
    model = aligned(16)
    override = ("--json-model-override-args", '{"index_share_for_mtp_iteration": false}')
    answers = together(pool.get(spec(model, 5, *override)), WAVE)
    histograms = [accept_histogram(answer, 5) for answer in answers]
    kept = {
        share: [
            simulate(model, list(r.input_ids), r.max_new_tokens, 5, share=share).histogram(5)
            for r in WAVE
        ]
        for share in (True, False)
    }
    assert histograms == kept[False]
    # Or the comparison could not tell sharing from not sharing.
    assert kept[True] != kept[False]


def test_an_embedding_and_a_head_of_its_own(pool: ServerPool) -> None:
    """The drafts are right only if the MTP layer's own are used, and wrong text would show else."""
    server = pool.get(spec(counting(own_head=True), 5))
    tokens = ring(10, 20 + 61)
    answer = Request(tuple(tokens[:20]), 61).send(server)
    assert answer["output_ids"] == tokens[20:]
    assert accept_histogram(answer, 5) == [0, 0, 0, 0, 0, 10]
    tokens = ring(NEVER_FROM, 20 + 10)
    assert Request(tuple(tokens[:20]), 10).send(server)["output_ids"] == tokens[20:]


@pytest.mark.parametrize("form", ["hidden", "attention"])
def test_a_perfect_draft_beyond_index_topk(pool: ServerPool, form: str) -> None:
    """The "attention" form reads the row before its own: a draft's row, which no selection made
    before the round can hold."""
    model = checkpoint("--mtp", "--mtp-perfect", form)
    answer = Request(tuple(prompt(100, 3, vocab=512)), 61).send(pool.get(spec(model, 5)))
    assert accept_histogram(answer, 5) == [0, 0, 0, 0, 0, 10]


SAMPLES, POSITIONS, VOCAB = 20_000, 8, 16


def sampled(pool: ServerPool, steps: int) -> torch.Tensor:
    """`[SAMPLES, POSITIONS]` tokens drawn after one prompt."""
    model = aligned(16, layers=3, vocab_size=VOCAB)
    server = pool.get(spec(model, steps, "--skip-tokenizer-init", "--random-seed", "7"))
    rows: list[list[int]] = []
    while len(rows) < SAMPLES:
        response = server.post(
            "/generate",
            input_ids=prompt(24, 1, vocab=VOCAB),
            sampling_params={
                "temperature": 0.9,
                "top_p": 0.95,
                "max_new_tokens": POSITIONS,
                "ignore_eos": True,
                "n": 250,
            },
        )
        assert response.status_code == 200, response.text
        rows += [answer["output_ids"] for answer in response.json()]
    return torch.tensor(rows[:SAMPLES])


def test_sampled_output_has_the_distribution_of_a_server_without_drafts(pool: ServerPool) -> None:
    without, with_drafts = sampled(pool, 0), sampled(pool, 5)
    for position in range(POSITIONS):
        counts = torch.stack(
            [
                torch.bincount(tokens[:, position], minlength=VOCAB)
                for tokens in (without, with_drafts)
            ]
        ).double()
        # Expected counts of a test of homogeneity; rare tokens are pooled into one class.
        rare = counts.sum(0) < 20
        counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], 1)
        expected = counts.sum(0, keepdim=True) * counts.sum(1, keepdim=True) / counts.sum()
        degrees = int((expected[0] > 0).sum()) - 1
        p = chi_square_p(counts.flatten(), expected.flatten(), degrees)
        assert p > 0.001, f"output position {position + 1}: p = {p:.2g}"
