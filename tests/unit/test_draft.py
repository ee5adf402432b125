"""Constructed and simulated MTP decoding.

test_perfect_target_follows_its_definition   transformers computes what the tables say
test_perfect_drafts_are_all_accepted         every draft position, both constructions
test_perfect_survives_narrow_caches          margins outlast FP8 rows and index pages
test_every_wiring_fault_is_rejected          mutants of the draft's wiring lose acceptance
test_shared_index_hides_new_rows             why "attention" is not for index sharing
test_drafts_do_not_change_the_text           random MTP layer, several chain lengths
test_session_truncate                        rejected drafts leave no trace
test_draft_refuses                           no MTP layer, no steps
test_perfect_spec_refuses                    options that the construction cannot hold
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from sglang_glm.checkpoint.perfect_mtp import next_live_token
from sglang_glm.checkpoint.spec import CheckpointSpec
from sglang_glm.checkpoint.writer import write_checkpoint
from sglang_glm.verification.draft import Draft, decode_with_drafts
from sglang_glm.verification.formats import CacheFormats
from sglang_glm.verification.oracle import Oracle, continuation
from sglang_glm.verification.prompts import random_prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANDOM = CheckpointSpec(
    num_hidden_layers=3,
    first_k_dense_replace=1,
    indexer_types=("full", "shared", "full"),
    n_routed_experts=4,
    moe_intermediate_size=64,
    index_n_heads=4,
    index_topk=6,
    vocab_size=512,
    num_nextn_predict_layers=1,
)
STEPS = 4
NEW_TOKENS = 20
PROMPT = random_prompt(400, 24, seed=1)


@pytest.fixture(scope="module", params=["hidden", "attention"])
def perfect(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("perfect") / request.param
    write_checkpoint(dataclasses.replace(RANDOM, mtp_perfect=request.param), directory)
    return directory


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "model"
    write_checkpoint(RANDOM, directory)
    return directory


def by_definition(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(next_live_token(RANDOM, tokens))
    return tokens[len(PROMPT) :]


def test_perfect_target_follows_its_definition(perfect: Path) -> None:
    run = Oracle(perfect).greedy(PROMPT, NEW_TOKENS)
    assert continuation(run, len(PROMPT)) == by_definition(NEW_TOKENS)
    # All three codes are read: a text that ignored one would repeat far more.
    assert len(set(by_definition(60))) > 16
    best = run.logprobs[len(PROMPT) :].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 0.9


def test_perfect_drafts_are_all_accepted(perfect: Path) -> None:
    text = decode_with_drafts(Oracle(perfect), PROMPT, NEW_TOKENS, steps=STEPS)
    assert text.token_ids[:NEW_TOKENS] == by_definition(NEW_TOKENS)
    assert text.accepted == [STEPS] * len(text.accepted)
    assert text.histogram(STEPS) == [0] * STEPS + [len(text.accepted)]


def test_perfect_survives_narrow_caches(perfect: Path) -> None:
    formats = CacheFormats(latent="fp8", index_key="fp8", index_query="fp8")
    text = decode_with_drafts(Oracle(perfect, formats=formats), PROMPT, NEW_TOKENS, steps=2)
    assert text.token_ids[:NEW_TOKENS] == by_definition(NEW_TOKENS)
    assert set(text.accepted) == {2}


def skip_enorm(draft: Draft) -> None:
    draft.enorm = torch.nn.Identity()


def skip_hnorm(draft: Draft) -> None:
    draft.hnorm = torch.nn.Identity()


def swap_halves(draft: Draft) -> None:
    draft.eh_proj.weight.data = draft.eh_proj.weight.data.roll(RANDOM.hidden_size, 1)


def skip_shared_head_norm(draft: Draft) -> None:
    draft.norm = torch.nn.Identity()


def feed_raw_hidden(draft: Draft) -> None:
    # As if the target's states were taken before its final norm.
    weight = draft.oracle.model.model.norm.weight
    inner = draft.hnorm
    draft.hnorm = lambda hidden: inner(hidden / weight)


def repeat_position(draft: Draft) -> None:
    # As if a draft step wrote over the row before it.
    extend = draft.extend

    def stale(token_ids, hidden, selection=None):
        if len(token_ids) == 1 and draft.length > len(PROMPT):
            draft.truncate(draft.length - 1)
        return extend(token_ids, hidden, selection)

    draft.extend = stale


FAULTS: list[tuple[Callable[[Draft], None], tuple[str, ...]]] = [
    (skip_enorm, ("hidden", "attention")),
    (skip_hnorm, ("hidden", "attention")),
    (swap_halves, ("hidden", "attention")),
    (skip_shared_head_norm, ("hidden", "attention")),
    (feed_raw_hidden, ("hidden", "attention")),
    # Only a draft that reads its own cache can notice.
    (repeat_position, ("attention",)),
]


@pytest.mark.parametrize(
    ("fault", "noticed_by"), FAULTS, ids=lambda item: getattr(item, "__name__", "")
)
def test_every_wiring_fault_is_rejected(
    perfect: Path,
    fault: Callable[[Draft], None],
    noticed_by: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(oracle: Oracle) -> Draft:
        draft = Draft(oracle)
        fault(draft)
        return draft

    monkeypatch.setattr("sglang_glm.verification.draft.Draft", faulty)
    text = decode_with_drafts(Oracle(perfect), PROMPT, NEW_TOKENS, steps=STEPS)
    assert text.token_ids[:NEW_TOKENS] == by_definition(NEW_TOKENS), "drafts changed the text"
    all_accepted = set(text.accepted) == {STEPS}
    assert all_accepted == (perfect.name not in noticed_by)


def test_shared_index_hides_new_rows(perfect: Path) -> None:
    text = decode_with_drafts(Oracle(perfect), PROMPT, NEW_TOKENS, steps=STEPS, share_index=True)
    assert text.token_ids[:NEW_TOKENS] == by_definition(NEW_TOKENS)
    if perfect.name == "hidden":
        assert set(text.accepted) == {STEPS}
    else:
        # The first two drafts read rows that existed when the selection was made.
        assert min(text.accepted) >= 2 and set(text.accepted) != {STEPS}


@pytest.mark.parametrize("share_index", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_drafts_do_not_change_the_text(
    random_checkpoint: Path, steps: int, share_index: bool
) -> None:
    oracle = Oracle(random_checkpoint)
    plain = continuation(oracle.greedy(PROMPT, 8), len(PROMPT))
    text = decode_with_drafts(oracle, PROMPT, 8, steps=steps, share_index=share_index)
    assert text.token_ids[:8] == plain
    assert sum(text.histogram(steps)) == len(text.accepted)
    assert len(text.token_ids) == 1 + sum(count + 1 for count in text.accepted)


def test_session_truncate(random_checkpoint: Path) -> None:
    oracle = Oracle(random_checkpoint)
    session = oracle.session(keep_hidden=True)
    session.extend(PROMPT)
    session.extend([5, 6, 7])
    session.truncate(len(PROMPT) - 2)
    session.extend(PROMPT[-2:])
    run, whole = session.result(), oracle.run(PROMPT, keep_hidden=True)
    assert torch.equal(run.token_ids, whole.token_ids)
    assert float((run.logprobs - whole.logprobs).abs().max()) < 5e-6
    assert run.hidden_states.shape == whole.hidden_states.shape
    assert run.relative_gap.shape == whole.relative_gap.shape
    assert all(torch.equal(run.selections[i], whole.selections[i]) for i in (0, 2))
    with pytest.raises(ValueError, match="length is 25"):
        session.truncate(25)


def test_draft_refuses(tmp_path: Path, random_checkpoint: Path) -> None:
    write_checkpoint(dataclasses.replace(RANDOM, num_nextn_predict_layers=0), tmp_path / "x")
    with pytest.raises(ValueError, match="written with --mtp"):
        Draft(Oracle(tmp_path / "x"))
    with pytest.raises(ValueError, match="steps is 0"):
        decode_with_drafts(Oracle(random_checkpoint), PROMPT, 4, steps=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mtp_perfect": "yes"}, "mtp_perfect"),
        ({"mtp_perfect": "hidden", "num_nextn_predict_layers": 0}, "num_nextn_predict_layers"),
        ({"mtp_perfect": "hidden", "fp8": True}, "fp8"),
        ({"mtp_perfect": "hidden", "hidden_size": 128}, "hidden_size"),
        ({"mtp_perfect": "attention", "index_topk": 2}, "index_topk"),
    ],
)
def test_perfect_spec_refuses(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint: {named} is "):
        dataclasses.replace(RANDOM, **change)
