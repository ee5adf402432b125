"""Draft steps reuse one selection a request, and write the index key that later rounds search."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_glm.attention.metadata import plan_rows
from sglang_glm.layers import index_selection, indexer
from sglang_glm.layers.draft_selection import extend_selection

TOPK, HEADS, DIM, ROPE, HIDDEN = 8, 4, 128, 64, 32
NONE = [-1] * TOPK


def padded(*positions: int) -> torch.Tensor:
    return torch.tensor([*positions, *NONE][:TOPK], dtype=torch.int32)


def test_drafted_positions_join_where_there_is_room() -> None:
    assert extend_selection(padded(3, 0, 4), 5, 6).tolist() == [3, 0, 4, 5, -1, -1, -1, -1]


def test_drafted_positions_replace_the_lowest_ranked_where_there_is_none() -> None:
    full = padded(30, 2, 17, 5, 9, 11, 1, 28)
    assert extend_selection(full, 31, 34).tolist() == [30, 2, 17, 5, 9, 31, 32, 33]


@pytest.mark.parametrize("count", [3, 8])
def test_steps_in_turn_give_what_each_would_alone(count: int) -> None:
    """A step may be handed the seed, or what the step before it made of the seed."""
    seed = padded(*torch.randperm(31)[:count].tolist())
    carried = seed
    for cache_seqlen in range(32, 37):
        carried = extend_selection(carried, 31, cache_seqlen)
        assert carried.tolist() == extend_selection(seed, 31, cache_seqlen).tolist()


def test_a_context_within_index_topk_is_seen_in_full() -> None:
    for cache_seqlen in (4, 5, TOPK):
        chosen = extend_selection(padded(0, 1, 2), 3, cache_seqlen)
        assert sorted(chosen[chosen >= 0].tolist()) == list(range(cache_seqlen))


@pytest.mark.parametrize("carried", [NONE, [40, 41, -1, -1, -1, -1, -1, -1]])
def test_nothing_valid_is_nothing_to_reuse(carried: list[int]) -> None:
    """No seed, or one of another, longer request: the step computes its own."""
    assert extend_selection(torch.tensor(carried, dtype=torch.int32), 31, 32) is None


@pytest.mark.parametrize("verified_len", [TOPK - 2, TOPK])
def test_the_first_step_beyond_index_topk_ranks_for_itself(verified_len: int) -> None:
    """What it would reuse lists every position in order, the newest as if they mattered least."""
    everything = padded(*range(verified_len))
    assert extend_selection(everything, verified_len, TOPK + 1) is None


class FakeCache:
    """Index keys by slot, and which slots were written since the last look."""

    def __init__(self) -> None:
        self.store_ = torch.zeros(640, DIM)
        self.written: list[int] = []

    def store(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor) -> None:
        self.store_[slots] = k
        self.written += slots.tolist()

    def load(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        return self.store_[slots]

    def keys(self, layer_id: int) -> torch.Tensor:
        return self.store_


class Drafts:
    """Requests of given verified lengths in a draft round, without a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
        self.cache = FakeCache()
        self.cache.store_[:] = torch.randn(640, DIM)
        self.lengths = lengths
        slots = torch.randperm(640)
        self.table = torch.stack([slots[i * 64 : (i + 1) * 64] for i in range(len(lengths))]).int()
        linear = lambda out, fan_in: torch.randn(out, fan_in) / fan_in**0.5
        wk, wq = linear(DIM, HIDDEN), linear(HEADS * DIM, HIDDEN)
        self.module = SimpleNamespace(
            index_topk=TOPK,
            n_heads=HEADS,
            head_dim=DIM,
            rope_head_dim=ROPE,
            softmax_scale=DIM**-0.5,
            wk=lambda x: (x @ wk.T, None),
            wq_b=lambda x: (x @ wq.T, None),
            k_norm=torch.nn.LayerNorm(DIM),
            weights_proj=SimpleNamespace(weight=linear(HEADS, HIDDEN)),
            rotary_emb=lambda positions, q, k: (q, k),
        )
        self.backend = SimpleNamespace(
            forward_metadata=None,
            get_indexer_metadata=lambda layer_id, batch: self.backend.forward_metadata,
        )
        pool = SimpleNamespace(index_key_cache=self.cache)
        monkeypatch.setattr(indexer, "get_attn_backend", lambda: self.backend)
        monkeypatch.setattr(indexer, "get_token_to_kv_pool", lambda: pool)
        # One rank has nobody to agree with.
        monkeypatch.setattr(indexer, "settle_selection", lambda selected, layer_id: selected)
        alone = SimpleNamespace(attn_tp_group=SimpleNamespace(world_size=1))
        monkeypatch.setattr(index_selection, "get_parallel", lambda: alone)

    @torch.no_grad()
    def step(self, step: int, x: torch.Tensor, carried: torch.Tensor | None) -> torch.Tensor:
        lengths = torch.tensor(self.lengths)
        rows = torch.arange(len(self.lengths))
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(self.lengths),
            seq_lens=lengths,
            req_pool_indices=rows,
            out_cache_loc=self.table[rows, lengths + step],
            spec_info=SimpleNamespace(dsa_topk_indices=carried),
            reuse_dsa_topk_indices=carried is not None,
        )
        self.backend.forward_metadata = plan_rows(batch, self.table, draft_step=step)
        return indexer.indexer_forward(self.module, x, x, lengths + step, batch, 0)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_draft_step_sees_the_drafts_before_it(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    drafts = Drafts(monkeypatch, [3, 20])
    drafts.step(step, torch.randn(2, HIDDEN), None)
    planned = drafts.backend.forward_metadata.requests
    assert [request.cache_seqlen for request in planned] == [3 + step + 1, 20 + step + 1]
    assert [request.num_drafted for request in planned] == [step + 1] * 2
    assert planned[1].slots.tolist() == drafts.table[1, : 20 + step + 1].tolist()


def test_a_step_that_reuses_a_selection_still_writes_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts = Drafts(monkeypatch, [20, 40])
    x = torch.randn(2, HIDDEN)
    seeds = torch.stack([padded(*range(TOPK)), padded(*range(10, 10 + TOPK))])
    drafts.step(1, x, seeds)
    slots = [drafts.table[0, 21].item(), drafts.table[1, 41].item()]
    assert drafts.cache.written == slots
    expected = drafts.module.k_norm(drafts.module.wk(x)[0])
    torch.testing.assert_close(drafts.cache.store_[slots], expected)


def test_each_request_keeps_its_own_seed_and_one_without_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts = Drafts(monkeypatch, [20, 33, 40])
    x = torch.randn(3, HIDDEN)
    seeds = torch.stack([padded(*range(TOPK)), padded(), padded(*range(10, 10 + TOPK))])
    chosen = drafts.step(0, x, seeds)
    computed = drafts.step(0, x, None)
    assert chosen[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 20]
    assert chosen[1].tolist() == computed[1].tolist()
    assert chosen[2].tolist() == [10, 11, 12, 13, 14, 15, 16, 40]
    # Had nobody brought a seed, no request would have chosen these.
    assert computed[0].tolist() != chosen[0].tolist()


def test_an_idle_draft_step_forgets_the_round_before() -> None:
    """SGLang plans no idle draft step, so its backend still holds the last plan, or None."""
    from sglang_glm.attention.host_backend import GlmDsaHostAttnBackend

    backend = object.__new__(GlmDsaHostAttnBackend)
    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    for left_over in (SimpleNamespace(requests=("stale",)), None):
        backend.forward_metadata = left_over
        assert backend.get_indexer_metadata(0, idle).requests == ()


def test_seeds_follow_their_requests_when_one_leaves_and_one_joins() -> None:
    """SGLang's own bookkeeping of the seeds, which the above builds on."""
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    def drafting(seeds: list[torch.Tensor]) -> EagleDraftInput:
        count = len(seeds)
        return EagleDraftInput(
            topk_p=torch.ones(count, 1),
            topk_index=torch.arange(count)[:, None],
            hidden_states=torch.zeros(count, HIDDEN),
            bonus_tokens=torch.arange(count),
            dsa_topk_indices=torch.stack(seeds),
        )

    running = drafting([padded(1), padded(2), padded(3)])
    running.filter_batch(torch.tensor([0, 2]))
    running.merge_batch(drafting([padded(4)]))
    assert running.dsa_topk_indices[:, 0].tolist() == [1, 3, 4]
    # A request without a seed costs the others theirs for one round; it never borrows one.
    without = drafting([padded(5)])
    without.dsa_topk_indices = None
    running.merge_batch(without)
    assert running.dsa_topk_indices is None
