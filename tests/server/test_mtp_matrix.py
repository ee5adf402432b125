"""The matrix behind `test_mtp.py`.

test_a_server_without_drafts      the golden answers of `test_mtp.py`, from their two sources
test_text_and_accepts             steps 1 to 5, within and beyond index_topk, as transformers (T15)
test_scripted_accepts             steps 1 to 5, every accept length that they allow (T15)
test_crossing_2048                the released index_topk is crossed by verify and draft steps
test_accepts_without_sharing      index sharing off
test_an_embedding_and_a_head_*    an MTP layer with its own
test_a_perfect_draft_beyond_*     selections that hold the drafts before a step
test_narrow_formats               FP8 rows and pages, and BF16: as without drafts up to a proven near-tie
test_adaptive                     --speculative-adaptive changes the steps, not the text
test_sampled_output_*             chi-square of output positions 1 to 7
"""

from __future__ import annotations

import pytest
import torch

from tests.golden.make_mtp_golden import make
from tests.support.checkpoints import checkpoint
from tests.support.chi_square import goodness_p
from tests.support.mtp_checkpoints import NEVER_FROM, aligned, counting, ring
from tests.support.mtp_sampling import marginals
from tests.support.mtp_scripted import accepts, scripted, walk
from tests.support.mtp_simulation import simulate
from tests.support.mtp_traffic import (
    ARGS,
    ENV,
    INDEX_TOPK,
    WAVE,
    Request,
    accept_histogram,
    draft_args,
    golden,
    prompt,
    swap_weights,
    together,
    with_top_two,
)
from tests.support.server import ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.slow]

BASE = ("--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "64")


def spec(model: str, steps: int = 0, *extra: str) -> ServerSpec:
    drafts = draft_args(steps) if steps else ()
    return ServerSpec(model=model, args=(*BASE, *drafts, *extra))


def histogram(rounds: list[int], steps: int) -> list[int]:
    return [rounds.count(count) for count in range(steps + 1)]


def test_a_server_without_drafts(pool: ServerPool) -> None:
    made, stored = make(pool.get(ServerSpec(aligned(INDEX_TOPK), ARGS, ENV))), golden()
    assert made["accepted"] == stored["accepted"]
    for name, batch in stored["answers"].items():
        for got, answer in zip(made["answers"][name], batch, strict=True):
            assert got["output_ids"] == answer["output_ids"], name
            assert got["text"] == answer["text"], name


@pytest.fixture(
    scope="module",
    params=[(index_topk, steps) for index_topk in (8, 64) for steps in (1, 2, 3, 4, 5)],
    ids=lambda served: f"topk{served[0]}-steps{served[1]}",
)
def served(request: pytest.FixtureRequest) -> tuple[int, int]:
    """index_topk and steps of the server; pytest runs what shares one in a row."""
    return request.param


def test_text_and_accepts(pool: ServerPool, served: tuple[int, int]) -> None:
    index_topk, steps = served
    model = aligned(index_topk)
    answers = together(pool.get(spec(model, steps)), WAVE)
    for request, answer in zip(WAVE, answers, strict=True):
        expected = simulate(
            model, list(request.input_ids), request.max_new_tokens, steps, share=True
        )
        assert answer["output_ids"] == expected.token_ids[: request.max_new_tokens]
        assert accept_histogram(answer, steps) == expected.histogram(steps)


def test_scripted_accepts(pool: ServerPool, served: tuple[int, int]) -> None:
    index_topk, steps = served
    server = pool.get(spec(aligned(index_topk), steps))
    swap_weights(server, scripted("mixed", index_topk))
    try:
        batch = [Request(tuple(prompt(n, 300 + n)), 40) for n in (3, 12, 40, 100)]
        answers = together(server, batch)
    finally:
        swap_weights(server, aligned(index_topk))
    counts = torch.zeros(steps + 1, dtype=torch.int64)
    for request, answer in zip(batch, answers, strict=True):
        ids = list(request.input_ids)
        assert answer["output_ids"] == walk(ids, 40)
        expected = histogram(accepts(ids, 40, steps, "mixed"), steps)
        assert accept_histogram(answer, steps) == expected
        counts += torch.tensor(expected)
    assert counts.min() > 0


def test_crossing_2048(pool: ServerPool) -> None:
    """Draft steps, verify and draft extend begin below 2,048 positions and end above."""
    model = aligned(2048)
    server = pool.get(spec(model, 3, "--chunked-prefill-size", "1024"))
    batch = [Request(tuple(prompt(length, length)), 16) for length in (2037, 2045, 2060)]
    for request, answer in zip(batch, together(server, batch), strict=True):
        expected = simulate(model, list(request.input_ids), 16, 3, share=True)
        assert answer["output_ids"] == expected.token_ids[:16]
        assert accept_histogram(answer, 3) == expected.histogram(3)


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


#: Flags of a number format, and how far apart two tokens' log-probabilities may be for its rounding
#: to exchange them.
FORMATS = {
    # FP32 arithmetic over 656-byte rows and 8,448-byte index pages.
    "fp8_caches": (("--dtype", "float32", "--kv-cache-dtype", "fp8_e4m3"), 4e-3),
    "bf16": (("--dtype", "bfloat16"), 0.1),
}


@pytest.mark.parametrize("name", FORMATS)
def test_narrow_formats(pool: ServerPool, name: str) -> None:
    flags, bound = FORMATS[name]
    batch = [with_top_two(request) for request in WAVE]
    plain, drafts = (
        together(pool.get(spec(aligned(INDEX_TOPK), steps, *flags)), batch) for steps in (0, 5)
    )
    compared = 0
    for without, with_drafts in zip(plain, drafts, strict=True):
        pairs = zip(without["output_ids"], with_drafts["output_ids"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        compared += len(without["output_ids"]) if same is None else same
        if same is not None:
            (best, a, _), (second, b, _) = without["meta_info"]["output_top_logprobs"][same][:2]
            assert {a, b} >= {with_drafts["output_ids"][same]}, (name, same)
            assert best - second <= bound, f"{name}: token {same} differs by {best - second:.3g}"
    assert compared >= 100, f"{name}: only {compared} tokens lie before a near-tie"


def test_adaptive(pool: ServerPool) -> None:
    server = pool.get(
        ServerSpec(aligned(INDEX_TOPK), (*ARGS, *draft_args(5), "--speculative-adaptive"), ENV)
    )
    expected = golden()["answers"]["wave"]
    for _ in range(2):
        answers = together(server, WAVE)
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]
    swap_weights(server, scripted("wrong", INDEX_TOPK))
    ids = prompt(30, 1)
    assert Request(tuple(ids), 60).send(server)["output_ids"] == walk(ids, 60)
    assert "Switch adaptive runtime state" in server.log
    server.wait_idle()


SAMPLES, POSITIONS, PARALLEL = 20_000, 7, 500
SAMPLING = {"temperature": 1.0, "top_p": 0.9}
SAMPLED_PROMPT = prompt(4, 1, vocab=64)


def sampled(pool: ServerPool, model: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn after one prompt `[SAMPLES, POSITIONS]`, and rounds by correct drafts."""
    flags = (
        *("--skip-tokenizer-init", "--random-seed", "7"),
        *("--max-total-tokens", str(PARALLEL * 64 + 4096), "--max-running-requests", str(PARALLEL)),
    )
    server = pool.get(spec(model, steps, *flags))
    rows: list[list[int]] = []
    rounds = torch.zeros(steps + 1, dtype=torch.int64)
    while len(rows) < SAMPLES:
        body = {"max_new_tokens": POSITIONS, "ignore_eos": True, "n": PARALLEL, **SAMPLING}
        response = server.post("/generate", input_ids=SAMPLED_PROMPT, sampling_params=body)
        assert response.status_code == 200, response.text
        for answer in response.json():
            rows.append(answer["output_ids"])
            if steps:
                rounds += torch.tensor(accept_histogram(answer, steps))
    return torch.tensor(rows[:SAMPLES]), rounds


@pytest.mark.parametrize("steps", [0, 5])
def test_sampled_output_has_the_distribution_of_transformers(pool: ServerPool, steps: int) -> None:
    """With drafts and without; two tokens in three are drafted rightly."""
    # As few layers as a target may have beside an MTP layer, and few positions: every sample is a
    # request. (With one layer SGLang takes that one for the MTP layer.)
    model = checkpoint(
        *("--mtp-perfect", "attention", "--mtp", "--vocab-size", "512", "--layers", "2")
    )
    expected = marginals(model, SAMPLED_PROMPT, POSITIONS, **SAMPLING)
    tokens, rounds = sampled(pool, model, steps)
    # Or the test would not see what becomes of accepted drafts.
    assert steps == 0 or (rounds > SAMPLES // 100).all(), rounds
    for position in range(POSITIONS):
        counts = torch.bincount(tokens[:, position], minlength=expected.shape[1])
        p = goodness_p(counts, expected[position])
        assert p > 0.001, f"output position {position + 1}: p = {p:.2g}"
