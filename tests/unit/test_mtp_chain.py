"""Layout of draft chains, and which drafts are accepted.

Greedy acceptance and the block table are compared with loops; sampled acceptance with the
probabilities that the target gives, since any bias there changes what users read.
"""

from __future__ import annotations

import math

import pytest
import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_glm.compat.host.allocation import assign_req_to_token_pool_func
from sglang_glm.compat.host.cache_locs import (
    assign_draft_cache_locs_contiguous_func,
    assign_extend_cache_locs,
)
from sglang_glm.compat.host.eagle import fill_bonus_tokens_func
from sglang_glm.compat.host.renorm import top_k_renorm_prob, top_p_renorm_prob
from sglang_glm.compat.host.spec_tree import (
    build_tree_kernel_efficient_func,
    verify_tree_greedy_func,
)
from sglang_glm.compat.host.verify_sampling import tree_speculative_sampling_target_only
from sglang_glm.speculative.chain import accept_sampled, draw
from tests.support.chi_square import chi_square_p


def build(seq_lens: list[int], num_nodes: int, mode: TreeMaskMode, topk: int = 1) -> dict:
    batch_size = len(seq_lens)
    mask_size = {
        TreeMaskMode.FULL_MASK: sum(seq_lens) * num_nodes + batch_size * num_nodes**2,
        TreeMaskMode.QLEN_ONLY: batch_size * num_nodes**2,
        TreeMaskMode.QLEN_ONLY_BITPACKING: batch_size * num_nodes,
    }[mode]
    made = {
        "tree_mask": torch.ones(mask_size, dtype=torch.bool),
        "positions": torch.full((batch_size * num_nodes,), -7),
        "retrieve_index": torch.full((batch_size, num_nodes), -1),
        "retrieve_next_token": torch.full((batch_size, num_nodes), -1),
        "retrieve_next_sibling": torch.full((batch_size, num_nodes), -1),
    }
    build_tree_kernel_efficient_func(
        parent_list=torch.empty(0),
        top_scores_index=torch.empty(0),
        seq_lens=torch.tensor(seq_lens),
        topk=topk,
        spec_steps=num_nodes - 1,
        num_verify_tokens=num_nodes,
        tree_mask_mode=mode,
        **made,
    )
    return made


def test_a_chain_is_laid_out_node_after_node() -> None:
    made = build([5, 64, 0], 3, TreeMaskMode.FULL_MASK)
    assert made["positions"].tolist() == [5, 6, 7, 64, 65, 66, 0, 1, 2]
    assert made["retrieve_index"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert made["retrieve_next_token"].tolist() == [[1, 2, -1]] * 3
    assert made["retrieve_next_sibling"].tolist() == [[-1, -1, -1]] * 3


@pytest.mark.parametrize("num_nodes", [2, 4, 6])
def test_the_mask_shows_the_cache_and_the_nodes_before(num_nodes: int) -> None:
    seq_lens = [5, 0, 64, 1]
    full = build(seq_lens, num_nodes, TreeMaskMode.FULL_MASK)["tree_mask"]
    expected = [
        column <= seq_len + node
        for seq_len in seq_lens
        for node in range(num_nodes)
        for column in range(seq_len + num_nodes)
    ]
    assert full.tolist() == expected
    chain_only = build(seq_lens, num_nodes, TreeMaskMode.QLEN_ONLY)["tree_mask"]
    expected = [c <= n for _ in seq_lens for n in range(num_nodes) for c in range(num_nodes)]
    assert chain_only.tolist() == expected


def test_trees_and_packed_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="--speculative-eagle-topk is 2, expected 1"):
        build([4], 3, TreeMaskMode.FULL_MASK, topk=2)
    with pytest.raises(ValueError, match="QLEN_ONLY_BITPACKING"):
        build([4], 3, TreeMaskMode.QLEN_ONLY_BITPACKING)


def outputs(batch_size: int, num_nodes: int) -> dict[str, torch.Tensor]:
    return {
        "predicts": torch.full((batch_size * num_nodes,), -5, dtype=torch.int32),
        "accept_index": torch.full((batch_size, num_nodes), -1, dtype=torch.int32),
        "accept_token_num": torch.full((batch_size,), -9, dtype=torch.int32),
    }


@pytest.mark.parametrize("num_nodes", [2, 4, 6])
def test_greedy_acceptance_is_that_of_a_loop(num_nodes: int) -> None:
    batch_size = 200
    links = build([3] * batch_size, num_nodes, TreeMaskMode.QLEN_ONLY)
    # Few tokens, so that every accept length occurs.
    candidates = torch.randint(2, (batch_size, num_nodes))
    target = torch.randint(2, (batch_size, num_nodes))
    out = outputs(batch_size, num_nodes)
    verify_tree_greedy_func(
        candidates=candidates,
        retrieve_index=links["retrieve_index"],
        retrieve_next_token=links["retrieve_next_token"],
        retrieve_next_sibling=links["retrieve_next_sibling"],
        target_predict=target,
        topk=1,
        **out,
    )
    for request in range(batch_size):
        correct = 0
        while (
            correct + 1 < num_nodes and candidates[request, correct + 1] == target[request, correct]
        ):
            correct += 1
        first = request * num_nodes
        assert out["accept_token_num"][request] == correct
        rows = list(range(first, first + correct + 1))
        assert out["accept_index"][request].tolist() == rows + [-1] * (num_nodes - 1 - correct)
        committed = out["predicts"][first : first + num_nodes].tolist()
        assert committed[: correct + 1] == target[request, : correct + 1].tolist()
        assert committed[correct + 1 :] == [-5] * (num_nodes - 1 - correct)


def sample_rounds(
    table: torch.Tensor, drafts: list[int], rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the same chain `rounds` times against a target with P(next | present) = `table`.

    Returns:
        Drafts kept `[rounds]`, and the tokens of each round `[rounds, nodes]`, -5 behind the last.
    """
    num_nodes = len(drafts)
    candidates = torch.tensor(drafts).expand(rounds, -1)
    links = build([3] * rounds, num_nodes, TreeMaskMode.QLEN_ONLY)
    out = outputs(rounds, num_nodes)
    tree_speculative_sampling_target_only(
        candidates=candidates,
        retrive_index=links["retrieve_index"],
        retrive_next_token=links["retrieve_next_token"],
        retrive_next_sibling=links["retrieve_next_sibling"],
        uniform_samples=torch.rand(rounds, num_nodes),
        uniform_samples_for_final_sampling=torch.rand(rounds),
        target_probs=table[candidates],
        draft_probs=torch.zeros(1),
        **out,
    )
    return out["accept_token_num"], out["predicts"].view(rounds, num_nodes)


def test_sampled_tokens_keep_the_target_distribution() -> None:
    """Token j + 1 given token j follows the target's row, whichever way it was arrived at."""
    vocab, rounds = 6, 60_000
    table = torch.rand(vocab, vocab) ** 2
    table[1, 4] = 0.0
    table = table / table.sum(-1, keepdim=True)
    drafts = [2, 1, 4, 3]
    kept, tokens = sample_rounds(table, drafts, rounds)
    assert set(kept.tolist()) <= {0, 1}  # 4 after 1 is impossible
    for node in range(len(drafts)):
        reached = kept >= node
        count = int(reached.sum())
        if count < 1000:
            continue
        emitted = torch.bincount(tokens[reached, node].long(), minlength=vocab).double()
        assert chi_square_p(emitted, table[drafts[node]].double() * count) > 0.001
    # The draft is kept exactly as often as the target would have said it.
    rate = (kept >= 1).double().mean().item()
    assert rate == pytest.approx(table[2, 1].item(), abs=4 * math.sqrt(0.25 / rounds))


def test_a_certain_draft_is_always_kept_and_an_impossible_one_never() -> None:
    table = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert sample_rounds(table, [0, 1, 0, 1], 500)[0].tolist() == [3] * 500
    kept, tokens = sample_rounds(table, [0, 0, 0], 500)
    assert kept.tolist() == [0] * 500
    assert tokens[:, 0].tolist() == [1] * 500


@pytest.mark.parametrize("coin", [0.0, 1 - 2**-24])
def test_extreme_coins_never_draw_an_impossible_token(coin: float) -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    assert draw(probs.double(), torch.tensor([coin])).item() == (1 if coin == 0.0 else 3)
    accepted, last = accept_sampled(
        torch.tensor([[0, 2]]),
        probs.expand(1, 2, 5),
        torch.full((1, 2), coin),
        torch.tensor([coin]),
    )
    assert accepted.item() == 0 and last.item() in (1, 3)


def test_thresholds_keep_more() -> None:
    probs = torch.tensor([0.2, 0.8]).expand(1, 2, 2)
    coins = torch.full((1, 2), 0.5)
    arguments = (torch.tensor([[1, 0]]), probs, coins, torch.tensor([0.9]))
    assert accept_sampled(*arguments)[0].item() == 0
    assert accept_sampled(*arguments, threshold_acc=0.3)[0].item() == 1
    assert accept_sampled(*arguments, threshold_single=0.2)[0].item() == 1


def test_top_k_keeps_what_argmax_finds_among_equals() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]])
    assert top_k_renorm_prob(probs, torch.tensor([1, 1])).argmax(-1).tolist() == [1, 0]
    assert top_k_renorm_prob(probs, torch.tensor([2, 3])).tolist() == [
        [0.0, 0.5, 0.5, 0.0],
        pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0]),
    ]
    torch.testing.assert_close(top_k_renorm_prob(probs, torch.tensor([1 << 30, 4])), probs)


def test_top_p_is_the_torch_samplers() -> None:
    from sglang.srt.layers.sampler import top_p_normalize_probs_torch

    probs = torch.softmax(3 * torch.randn(50, 200), -1)
    top_ps = torch.rand(50) * 0.98 + 0.01
    torch.testing.assert_close(
        top_p_renorm_prob(probs, top_ps), top_p_normalize_probs_torch(probs, top_ps)
    )
    torch.testing.assert_close(top_p_renorm_prob(probs, torch.ones(50)), probs)


def test_slots_are_entered_and_found_again() -> None:
    """Ragged requests in a table with unrelated rows, slots in no order."""
    table = torch.full((9, 40), -1, dtype=torch.int32)
    rows, starts, ends = [4, 0, 7], [3, 0, 11], [9, 0, 20]
    slots = torch.randperm(500)[:15]
    assign_req_to_token_pool_func(
        torch.tensor(rows), table, torch.tensor(starts), torch.tensor(ends), slots, 3
    )
    assert table[4, 3:9].tolist() == slots[:6].tolist()
    assert table[7, 11:20].tolist() == slots[6:].tolist()
    assert (table >= 0).sum() == 15
    pools, lens = torch.tensor([4, 7]), torch.tensor([4, 12])
    out, positions = torch.full((8,), -1), torch.full((2,), -1)
    assign_draft_cache_locs_contiguous_func(pools, table, lens, out, 1, 4, positions=positions)
    assert out.view(2, 4).tolist() == [table[4, 4:8].tolist(), table[7, 12:16].tolist()]
    assert positions.tolist() == [4, 12]
    found = assign_extend_cache_locs(
        req_pool_indices=pools,
        req_to_token=table,
        start_offset=lens,
        end_offset=lens + 4,
        batch_size=2,
        draft_token_num=4,
        device="cpu",
    )
    assert found.tolist() == out.tolist()
    assert found.dtype == torch.int64


def test_the_bonus_token_is_the_last_committed_one() -> None:
    bonus = torch.empty(3, dtype=torch.int32)
    tokens = torch.tensor([[7, 8, 9], [4, 0, 0], [1, 2, 0]], dtype=torch.int32)
    fill_bonus_tokens_func(tokens, torch.tensor([3, 1, 2]), bonus, 3, 3)
    assert bonus.tolist() == [9, 4, 2]
