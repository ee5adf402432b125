"""One expert exchange that every implementation gets, and what it must give.

Expert e multiplies a row by `expert_scales[e]`: what arrives at the wrong expert, with the wrong
weight, twice or not at all changes the sum, and the right sum needs no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_glm.parallel.all_to_all_ref import dispatch_ref, moe_ref

#: Columns that the references, which loop, look at.
REF_COLUMNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCase:
    """Sizes of an exchange; GLM-5.3's by default.

    Attributes:
        num_tokens: Of each rank, in order of ranks.
    """

    num_tokens: tuple[int, ...]
    hidden_size: int = 6144
    num_experts: int = 256
    num_topk: int = 8

    @property
    def world_size(self) -> int:
        return len(self.num_tokens)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.world_size

    @property
    def name(self) -> str:
        counts = "+".join(map(str, sorted(set(self.num_tokens))))
        return f"{self.world_size} ranks, {counts} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInputs:
    """What one rank dispatches.

    Attributes:
        hidden_states: `[num_tokens, hidden_size]` bf16.
        topk_ids: `[num_tokens, num_topk]` int64, distinct within a row.
        topk_weights: `[num_tokens, num_topk]` fp32.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def rank_inputs(case: ExchangeCase, rank: int, device: str) -> RankInputs:
    """The inputs of any rank: every rank can make every other's."""
    rng = torch.Generator(device).manual_seed(7 + rank)
    count = case.num_tokens[rank]
    hidden = torch.randn(count, case.hidden_size, generator=rng, device=device)
    chance = torch.rand(count, case.num_experts, generator=rng, device=device)
    weights = torch.rand(count, case.num_topk, generator=rng, device=device)
    return RankInputs(
        hidden_states=hidden.bfloat16(),
        topk_ids=chance.topk(case.num_topk, dim=1).indices,
        topk_weights=weights / weights.sum(dim=1, keepdim=True),
    )


def expert_scales(case: ExchangeCase, device: str) -> torch.Tensor:
    """`[num_experts]` fp32, the factor of each expert."""
    return torch.linspace(0.5, 1.5, case.num_experts, device=device)


def expected_output(case: ExchangeCase, inputs: RankInputs) -> torch.Tensor:
    """`[num_tokens, hidden_size]` fp32: dispatch, experts and combine together, of one rank."""
    scales = expert_scales(case, str(inputs.hidden_states.device))
    factor = (inputs.topk_weights * scales[inputs.topk_ids]).sum(dim=1, keepdim=True)
    return inputs.hidden_states.float() * factor


def check_against_loops(case: ExchangeCase, inputs: RankInputs) -> None:
    """Hold `expected_output` against the looping reference on a few columns.

    Raises:
        AssertionError: they differ.
    """
    columns = inputs.hidden_states[:, :REF_COLUMNS].cpu()
    experts = expert_scales(case, "cpu")[:, None, None] * torch.eye(REF_COLUMNS)
    loops = moe_ref(columns, inputs.topk_ids.cpu(), inputs.topk_weights.cpu(), experts)
    whole = expected_output(case, inputs)[:, :REF_COLUMNS].cpu()
    torch.testing.assert_close(whole, loops, rtol=1e-5, atol=1e-5)


def arrived_by_loops(case: ExchangeCase, rank: int, device: str) -> list[tuple]:
    """What `rank` must receive, by the looping reference: source, token, columns, ids, weights."""
    every = [rank_inputs(case, source, device) for source in range(case.world_size)]
    return dispatch_ref(
        [inputs.hidden_states[:, :REF_COLUMNS].cpu() for inputs in every],
        [inputs.topk_ids.cpu() for inputs in every],
        [inputs.topk_weights.cpu() for inputs in every],
        case.num_experts,
    )[rank]


def check_arrived(
    case: ExchangeCase,
    rank: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Hold what a dispatch delivered against the looping reference, row by row.

    Args:
        case: The case.
        rank: The receiver.
        hidden_states: `[num_received, hidden_size]` bf16.
        topk_ids: `[num_received, num_topk]`, local ids, -1 for other ranks' experts.
        topk_weights: `[num_received, num_topk]` fp32; read only where the id is not -1.

    Raises:
        AssertionError: a row is missing, in another place, or routed differently.
    """
    expected = arrived_by_loops(case, rank, str(hidden_states.device))
    assert len(hidden_states) == len(expected), f"{len(hidden_states)} rows, not {len(expected)}"
    if not expected:
        return
    rows = torch.stack([row[2] for row in expected])
    assert torch.equal(hidden_states[:, :REF_COLUMNS].cpu(), rows), "rows in another order"
    ids = torch.tensor([row[3] for row in expected])
    assert torch.equal(topk_ids.cpu().long(), ids), "local expert ids differ"
    weights = torch.tensor([row[4] for row in expected])
    assert torch.equal(topk_weights.cpu().masked_fill(ids < 0, 0), weights), "weights differ"


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values; 0 without rows."""
    if not expected.numel():
        return 0.0
    difference = got.float() - expected.float()
    return float(difference.square().mean().sqrt() / expected.float().square().mean().sqrt())


def rows_to_others(case: ExchangeCase, inputs: RankInputs, rank: int) -> int:
    """Rows that leave `rank` when a token goes once to every rank that holds one of its experts."""
    owner = inputs.topk_ids // case.num_local_experts
    return sum(
        int((owner == other).any(dim=1).sum()) for other in range(case.world_size) if other != rank
    )


def pairs_to_others(case: ExchangeCase, inputs: RankInputs, rank: int) -> int:
    """Rows that leave `rank` when a token goes once to each of its experts."""
    return int((inputs.topk_ids // case.num_local_experts != rank).sum())
