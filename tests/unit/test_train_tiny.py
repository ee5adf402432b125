"""The trainer's own forward is transformers' and the server's, or what it trains is another model.

| test | catches |
| --- | --- |
| logits, dense and sparse | RoPE layout, norms, router, scaling, shared selections |
| drafts of a chain | the order of rows, hidden states and tokens in MTP training |
| index scores | the Triton kernel's formula against the plain one |
| scaled pairs | an export that changes scores, or hides the layout |
| rounded keys | another rounding than the index cache's |
| crowded documents | a question whose answer is not what was stated last |
| words | a word of the vocabulary that is not one token |
"""

from __future__ import annotations

import dataclasses
import re
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from glm_kernels.cache.index_pages_ref import quantize_index_k_ref

from cookbook.train_tiny.chain import Chain, first_sequences, shift
from cookbook.train_tiny.export import write
from cookbook.train_tiny.index_scores import index_scores_torch
from cookbook.train_tiny.indexer import index_inputs, rotate_halves, round_e4m3
from cookbook.train_tiny.layers import rope_table, rotate
from cookbook.train_tiny.losses import LossWeights, compute_losses
from cookbook.train_tiny.model import Model
from cookbook.train_tiny.muon import Optimizer
from cookbook.train_tiny.notes import CODE_WEIGHT, CROWDED_WEIGHT
from cookbook.train_tiny.pair_scale import scale_pairs
from cookbook.train_tiny.parameters import init_parameters, unstack
from cookbook.train_tiny.sequences import Mix, SequenceWriter
from cookbook.train_tiny.spec import TINY
from sglang_glm.checkpoint.tiny.dialogues import filler, small_talk
from sglang_glm.checkpoint.tiny.tokenizer import build_tokenizer
from sglang_glm.checkpoint.tiny.words import (
    CODE_FIRST,
    CODE_SECOND,
    NAME_FIRST,
    NAME_SECOND,
    vocabulary,
)
from sglang_glm.verification.draft import Draft
from sglang_glm.verification.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = dataclasses.replace(
    TINY, hidden_size=64, kv_lora_rank=64, index_n_heads=4, index_head_dim=64, index_topk=16
)
LENGTH = 48


@pytest.fixture(scope="module")
def model() -> Model:
    parameters = init_parameters(SPEC, 3, "cpu")
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in parameters.items():
            if name.endswith("norm.weight"):
                value += 0.3 * torch.randn(value.shape, generator=generator)
            elif name.endswith("k_norm.bias"):
                value += 0.2 * torch.randn(value.shape, generator=generator)
            elif name.endswith("correction_bias"):
                value += 0.05 * torch.randn(value.shape, generator=generator)
            else:
                value *= 2.0
            if not name.endswith("correction_bias"):
                value.copy_(value.bfloat16())
    return Model(SPEC, parameters)


@pytest.fixture(scope="module")
def oracle(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp("tiny")
    tensors = {
        name: value.detach().contiguous()
        if name.endswith("correction_bias")
        else value.detach().bfloat16().contiguous()
        for name, value in unstack(model.parameters, SPEC).items()
    }
    write(SPEC, tensors, directory)
    return Oracle(directory)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(800, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("sparse", [False, True])
def test_logits_are_transformers(
    model: Model, oracle: Oracle, ids: torch.Tensor, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sparse:
        for layer in oracle.full_layers:
            monkeypatch.setattr(oracle._indexer(layer), "index_topk", LENGTH)
    with torch.no_grad():
        logits = model.logits(model.forward(ids, sparse=sparse).hidden).view(2, LENGTH, -1)
        for row in range(2):
            wanted = oracle.model(input_ids=ids[row : row + 1]).logits[0]
            assert (logits[row] - wanted).abs().max() < 2e-4
            if sparse:
                dense = model.logits(model.forward(ids, sparse=False).hidden).view(2, LENGTH, -1)
                assert (dense[row] - wanted)[SPEC.index_topk + 1 :].abs().max() > 1e-2


def test_chain_rows_are_what_a_round_of_drafts_computes(
    model: Model, oracle: Oracle, ids: torch.Tensor
) -> None:
    begin, steps, ids = LENGTH - 8, 4, ids[:1]
    next_ids = shift(ids, -1)
    with torch.no_grad():
        hidden = model.forward(ids, sparse=False).hidden
        table = rope_table(torch.arange(LENGTH), SPEC)
        x = model.nextn_input(hidden, next_ids.flatten())
        x, trace, _ = model.layer(SPEC.num_hidden_layers, x, table, 1, None, False)
        output = model.nextn_norm(x)[None]
        chain = Chain(model, first_sequences(trace, 1, LENGTH, LENGTH), output, LENGTH)
        draft = Draft(oracle)
        draft.layer.self_attn.indexer.index_topk = LENGTH
        rows = draft.extend(ids[0, 1 : begin + 2], hidden[: begin + 1])
        assert (rows.hidden[-1] - output[0, begin]).abs().max() < 2e-4
        for step in range(1, steps + 1):
            rows = draft.extend(ids[0, begin + step + 1 : begin + step + 2], rows.hidden[-1:])
            got = chain.step(next_ids)[0, begin + step]
            assert (rows.hidden[0] - got).abs().max() < 2e-4, step


@pytest.mark.parametrize("bf16", [False, True])
def test_every_weight_learns(model: Model, bf16: bool) -> None:
    mix = Mix(length=96, rows=4, retrieval=0.5, copying=0.25, questions=(0.5, 0.6), crowded=0.5)
    batch = SequenceWriter(7).batch(mix)
    scale = LossWeights(index_rows=32, chain_rows=2, chain_length=64)
    for sparse in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
            losses = compute_losses(model, batch[0].long(), batch[1], sparse, scale)
        losses.total.backward()
        for name, value in model.parameters.items():
            if name.endswith("correction_bias"):
                continue
            assert value.grad is not None, name
            assert value.grad.isfinite().all(), name
            assert value.grad.abs().max() > 0, name
            value.grad = None


def test_index_scores_follow_the_definition() -> None:
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(1, 9, 2, 8, generator=generator)
    k = torch.randn(1, 9, 8, generator=generator)
    weights = torch.randn(1, 9, 2, generator=generator)
    got = index_scores_torch(q, k, weights)[0]
    for t in range(9):
        for s in range(9):
            wanted = sum(
                float(weights[0, t, h]) * max(0.0, float(q[0, t, h] @ k[0, s])) for h in range(2)
            )
            assert got[t, s] == (pytest.approx(wanted, abs=1e-5) if s <= t else float("-inf"))


def test_keys_are_rounded_as_the_cache_stores_them() -> None:
    generator = torch.Generator().manual_seed(10)
    x = torch.randn(50, 128, generator=generator) * torch.rand(50, 1, generator=generator) * 1e3
    x.requires_grad_()
    codes, scale = quantize_index_k_ref(x.detach())
    rounded = round_e4m3(x)
    assert torch.equal(rounded.detach(), codes.float() * scale[:, None])
    rounded.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_scaled_pairs_change_no_score_but_in_the_other_layout(model: Model) -> None:
    tensors = {k: v.detach().bfloat16() for k, v in unstack(model.parameters, SPEC).items()}
    generator = torch.Generator().manual_seed(13)
    table = rope_table(torch.arange(LENGTH) * 50, SPEC)
    inputs = (
        torch.randn(LENGTH, SPEC.hidden_size, generator=generator),
        torch.randn(LENGTH, SPEC.q_lora_rank, generator=generator),
        table,
        SPEC,
    )

    def scores(turn: Callable = rotate, rounded: bool = False) -> torch.Tensor:
        parameters = {name: value.float() for name, value in tensors.items()}
        parts = index_inputs(parameters, 1, *inputs, turn=turn, rounded=rounded)
        return index_scores_torch(*(part[None] for part in parts))[0].tril()

    served, cached, wrong = scores(), scores(rounded=True), scores(rotate_halves)
    scale_pairs(tensors, SPEC)
    assert torch.equal(scores(), served)
    # Only e4m3's subnormal numbers see the scale.
    assert (scores(rounded=True) - cached).abs().max() < 2e-3 * cached.abs().max()
    assert (scores(rotate_halves) - wrong).abs().mean() > 4 * wrong.abs().mean()
    again = {name: value.clone() for name, value in tensors.items()}
    scale_pairs(again, SPEC)
    assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_crowded_documents_ask_for_what_was_stated_last() -> None:
    writer = SequenceWriter(11)
    crowded = 0
    for _ in range(5):
        ids, weights = writer.crowd(4096)
        assert len(ids) == len(weights) == 4096
        for i, weight in enumerate(weights[:-1]):
            if weight < CODE_WEIGHT or weights[i - 1] >= CODE_WEIGHT:
                continue
            before = writer.tokenizer.decode(ids[: i - 6])
            name = writer.tokenizer.decode(ids[i - 3 : i])
            _, _, said = before.rpartition(f"The code of{name}")
            assert said.startswith(writer.tokenizer.decode(ids[i : i + 2]) + ".")
            if weight == CROWDED_WEIGHT:
                crowded += 1
                assert before.count(f"The code of{name}") >= TINY.index_topk
    assert crowded > 5


def test_every_word_is_one_token() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab_size() <= TINY.vocab_size
    for word in vocabulary():
        assert len(tokenizer.encode(word).ids) == 1, word
    lists = (NAME_FIRST, NAME_SECOND, CODE_FIRST, CODE_SECOND)
    retrieval = [word for words in lists for word in words]
    assert len(set(retrieval)) == len(retrieval) == 128
    rng = Random(1)
    talk = " ".join(
        [filler(rng) for _ in range(500)] + [" ".join(small_talk(rng)) for _ in range(500)]
    )
    assert not set(retrieval) & set(re.findall(r"[a-z]+", talk.lower()))
    text = "Any other text, 你好, is spelled in bytes."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_questions_mark_codes_that_the_document_states() -> None:
    writer = SequenceWriter(8)
    ids, weights = writer.document(600, (0.4, 0.4))
    marked = [i for i, weight in enumerate(weights) if weight >= CODE_WEIGHT]
    assert len(marked) >= 10
    for first, second in zip(marked[::2], marked[1::2]):
        assert second == first + 1
        before = writer.tokenizer.decode(ids[: first - 6])
        name = writer.tokenizer.decode(ids[first - 3 : first])
        # The last that was said about the name is what counts.
        _, found, said = before.rpartition(f"The code of{name}")
        assert found
        assert said.startswith(writer.tokenizer.decode(ids[first : second + 1]) + ".")


def test_muon_steps_along_the_singular_vectors_and_leaves_the_rest_alone() -> None:
    generator = torch.Generator().manual_seed(9)
    matrix = torch.randn(6, 4, generator=generator)
    values = {
        "a.weight": torch.zeros(6, 4).requires_grad_(),
        "b.weight": torch.zeros(6, 4).requires_grad_(),
        "norm.weight": torch.ones(5).requires_grad_(),
    }
    optimizer = Optimizer(values, muon_lr=1.0, adam_lr=0.1)
    values["a.weight"].grad = matrix.clone()
    values["norm.weight"].grad = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])
    optimizer.step(1.0)
    assert not values["b.weight"].any()
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    update = -values["a.weight"].detach() / (0.2 * 6**0.5)
    # Newton-Schulz leaves singular values between 0.7 and 1.2, on the same vectors.
    inner = u.T @ update @ v.T
    assert (inner.diagonal() - 0.95).abs().max() < 0.3
    assert (inner - inner.diagonal().diag()).abs().max() < 0.05
    moved = values["norm.weight"].detach() - 1.0
    assert moved.tolist() == pytest.approx([-0.1, 0.1, -0.1, 0.1, -0.1], rel=1e-3)
