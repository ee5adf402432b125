"""The experts that SGLang's recorder counts are those that transformers' router chooses.

test_counts      every pass of prefill chunks, a batch, and its decode steps, layer by layer
test_plan        `sglang-glm plan --expert-record` reads that many experts
test_drafts      a verify round is one pass of all drafted rows, and draft steps are none
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from sglang_glm.cli.main import main
from tests.gpu.serving import experts
from tests.support.parity import clean_prompt, prompt, reference
from tests.support.specs import DRAFTS_16, EXPERT_RECORDS, TRUTH_8

if TYPE_CHECKING:
    from tests.support.server import Server

on_truth_8 = pytest.mark.parametrize("server", [TRUTH_8], indirect=True, ids=["truth"])
CHUNK, TOP_K, NEW = 128, 2, 5
#: Rows of one request in a round of `DRAFTS_16`.
DRAFTED = 6


def chosen(model: str, token_ids: list[int]) -> dict[int, torch.Tensor]:
    """MoE layer id to the experts that transformers' router chooses, `[rows, top_k]`."""
    oracle = reference(model).oracle
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int):
        return lambda _module, _args, output: seen.__setitem__(layer, output[2])

    handles = [
        layer.mlp.gate.register_forward_hook(keep(index))
        for index, layer in enumerate(oracle.model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    try:
        oracle.run(token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def body(prompts: list[list[int]]) -> dict:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW}
    return {"input_ids": prompts, "sampling_params": sampling}


@on_truth_8
def test_counts(server: Server) -> None:
    prompts = [clean_prompt(server, length) for length in (200, 40, 9)]
    server.flush_cache()
    passes = experts.record(server, EXPERT_RECORDS, TOP_K, **body(prompts))
    said = [server.generate(ids, max_new_tokens=NEW)["output_ids"] for ids in prompts]
    runs = [
        chosen(server.spec.model, [*ids, *output[:-1]])
        for ids, output in zip(prompts, said, strict=True)
    ]
    assert len(runs[0]) == 6 and all(set(item.counts) == set(runs[0]) for item in passes)
    steps = [item for item in passes if item.rows == len(prompts)]
    # The last token of each answer is never an input.
    assert len(steps) == NEW - 1
    for layer in runs[0]:
        for step, item in enumerate(steps):
            rows = torch.cat(
                [run[layer][len(ids) + step] for run, ids in zip(runs, prompts, strict=True)]
            )
            want = torch.bincount(rows, minlength=8)
            assert item.counts[layer] == tuple(want.tolist()), f"layer {layer}, step {step}"
        # How prompts share chunks is the scheduler's choice; their sum is not.
        total = torch.tensor([item.counts[layer] for item in passes]).sum(0)
        want = sum(torch.bincount(run[layer].flatten(), minlength=8) for run in runs)
        assert torch.equal(total, want), f"layer {layer}"


@on_truth_8
def test_plan(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.flush_cache()
    prompts = [prompt(server, 300, seed) for seed in range(3)]
    hit = experts.experts_hit(
        server, EXPERT_RECORDS, prompts, rows_per_request=1, chunk=CHUNK, top_k=TOP_K
    )
    mean = sum(hit["experts_hit"].values()) / len(hit["experts_hit"])
    assert 2 <= mean <= 6 and set(hit["prefill_experts_hit"].values()) == {8.0}
    (path,) = EXPERT_RECORDS.glob("*.pt")

    def expert_bytes(*extra: str) -> float:
        words = [server.spec.model, "--tp", "1", "--concurrency", "3", "--context", "300"]
        assert main(["plan", *words, "--chunked-prefill-size", "128", "--json", *extra]) == 0
        terms = json.loads(capsys.readouterr().out)["decode"]["terms"]
        return next(term["hbm_bytes"] for term in terms if term["name"] == "routed experts")

    got, of_one = expert_bytes("--expert-record", str(path)), expert_bytes("--experts-hit", "1")
    assert got / of_one == pytest.approx(mean, abs=0.01)


@pytest.mark.parametrize("server", [DRAFTS_16], indirect=True, ids=["drafts"])
def test_drafts(server: Server) -> None:
    config = json.loads((Path(server.spec.model) / "config.json").read_text())
    prompts = [list(range(10, 34)), list(range(40, 64))]
    server.flush_cache()
    passes = experts.record(server, EXPERT_RECORDS, config["num_experts_per_tok"], **body(prompts))
    moe = set(range(config["first_k_dense_replace"], config["num_hidden_layers"]))
    assert all(set(item.counts) == moe for item in passes)
    # Both prompts may be prefilled together, or one after the other.
    prefill = [item.rows for item in passes if item.rows >= len(prompts[0])]
    rounds = [item.rows for item in passes if item.rows < len(prompts[0])]
    assert sum(prefill) == sum(map(len, prompts))
    assert set(rounds) <= {DRAFTED, 2 * DRAFTED} and 2 * DRAFTED in rounds
