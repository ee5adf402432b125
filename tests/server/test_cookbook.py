"""Every recipe of the cookbook against a CPU server, as its docstring says to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.recipes import run_recipe
from tests.support.server import Server, ServerPool, ServerSpec
from tests.support.specs import BF16_8, DRAFTS_16, TRUTH_64

if TYPE_CHECKING:
    from pathlib import Path

SERVER = TRUTH_64

#: Recipe, its arguments for a tiny random checkpoint, and what it must say.
RUNS = [
    ("01_chat.py", (), "prompt tokens: "),
    ("02_streaming_reasoning.py", ("--max-tokens", "32"), "pieces of reasoning, 0 of answer"),
    ("03_tools.py", ("--forced",), "the model calls get_weather({'city': "),
    (
        "04_long_context_retrieval.py",
        ("--tokens", "1000", "--facts", "2", "--min-recall", "0"),
        "depth  75%",
    ),
    ("05_prefix_reuse.py", ("--tokens", "1000"), "text after a prefix hit: the same"),
    ("08_capacity_planning.py", (), "20,480 tokens an attention group"),
    (
        "09_load_test.py",
        (
            *("--requests", "4", "--concurrency", "2"),
            *("--input-tokens", "60", "--output-tokens", "8"),
        ),
        "output tokens/s",
    ),
    ("10_metrics.py", (), "dashboard row 'Cache': 5 of 5 metrics"),
    ("11_verify_checkpoint.py", ("--lengths", "5,65"), "passed"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), RUNS, ids=[name for name, _, _ in RUNS])
def test_recipe(server: Server, name: str, arguments: tuple[str, ...], said: str) -> None:
    result = run_recipe(name, "--url", server.url, *arguments)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert said in result.stdout
    server.wait_idle()


def test_backends(server: Server) -> None:
    words = ("--url", server.url, "--tokens", "300", "--new-tokens", "8")
    result = run_recipe("07_compare_dsa_backends.py", *words, "--url", server.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prefill glm_auto, decode glm_sparse, topk glm_exact") == 2
    assert result.stdout.count("text the same, max |dlogp| 0.0e+00") == 2


def test_recall_is_required(server: Server) -> None:
    """A random checkpoint finds nothing, and the recipe says so."""
    words = ("--url", server.url, "--tokens", "300", "--facts", "1")
    result = run_recipe("04_long_context_retrieval.py", *words)
    assert result.returncode == 1 and "recall 0.00 is below 1.0" in result.stderr


def test_a_call_is_required(server: Server) -> None:
    result = run_recipe("03_tools.py", "--url", server.url)
    assert result.returncode == 1 and "no tool call in" in result.stderr


def test_no_drafts(server: Server) -> None:
    result = run_recipe("06_measure_acceptance.py", "--url", server.url)
    assert result.returncode == 1 and "drafts nothing" in result.stderr


@pytest.mark.parametrize("server", [DRAFTS_16], indirect=True, ids=["drafts"])
def test_acceptance(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two three\nfour five six\n")
    words = ("--prompts", str(prompts), "--new-tokens", "61")
    result = run_recipe("06_measure_acceptance.py", "--url", server.url, *words)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[0].isdigit()]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5]
    shares = [float(row[1].rstrip("%")) / 100 for row in rows]
    # A draft counts only behind right ones, so each is accepted at most as often as the one before.
    assert shares[0] > 0 and shares == sorted(shares, reverse=True)
    for steps, row in enumerate(rows, start=1):
        assert float(row[2]) == pytest.approx(1 + sum(shares[:steps]), abs=0.01)


@pytest.mark.parametrize("server", [BF16_8], indirect=True, ids=["bf16"])
def test_capacity_of_a_bf16_server(server: Server) -> None:
    result = run_recipe("08_capacity_planning.py", "--url", server.url)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "B a token by the plan" in result.stdout


@pytest.mark.slow
def test_backends_differ_by_rounding(pool: ServerPool) -> None:
    """07 on the two prefill backends, one server after the other on this machine's memory."""
    pool.close()
    started = [
        Server(ServerSpec(TRUTH_64.model, (*TRUTH_64.args, "--dsa-prefill-backend", backend)))
        for backend in ("glm_masked", "glm_sparse")
    ]
    try:
        words = [word for server in started for word in ("--url", server.url)]
        result = run_recipe("07_compare_dsa_backends.py", *words, "--tokens", "700")
        assert result.returncode == 0, result.stdout + result.stderr
        assert "prefill glm_masked" in result.stdout and "prefill glm_sparse" in result.stdout
    finally:
        for server in started:
            server.stop()
