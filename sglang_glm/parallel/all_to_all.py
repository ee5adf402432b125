"""Expert-parallel dispatch and combine over torch.distributed alone.

A token goes once to every rank that holds one of its experts, as in DeepEP. Works wherever a process
group has `all_to_all_single`: gloo on the CPU, NCCL on CUDA. Row counts pass through the host, so a
CUDA graph cannot hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What `dispatch` sent where; `combine` sends it back along.

    Attributes:
        num_tokens: Rows that this rank dispatched from.
        token_of_sent_row: `[sum(sent_counts)]` int64, this rank's token in each row it sent, by
            destination rank, ascending within one.
        sent_counts: Rows sent to each rank.
        received_counts: Rows received from each rank.
    """

    num_tokens: int
    token_of_sent_row: torch.Tensor
    sent_counts: tuple[int, ...]
    received_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows that arrived for this rank's experts, by source rank, in the order of its tokens.

    Attributes:
        hidden_states: `[num_received, hidden]`.
        topk_ids: `[num_received, num_topk]` int32, local expert ids, -1 for other ranks' experts.
        topk_weights: `[num_received, num_topk]` fp32, zero where the id is -1.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def at_least_one_row(self) -> Dispatched:
        """The same, or one row without experts where nothing arrived: no kernel runs on no rows."""
        if self.hidden_states.shape[0]:
            return self
        num_topk = self.topk_ids.shape[1]
        return Dispatched(
            hidden_states=self.hidden_states.new_zeros(1, self.hidden_states.shape[1]),
            topk_ids=self.topk_ids.new_full((1, num_topk), -1),
            topk_weights=self.topk_weights.new_zeros(1, num_topk),
        )


def dispatch(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> tuple[Dispatched, Route]:
    """Send each token to the ranks that hold its experts.

    Rank r holds the experts `r * num_experts / n` up to the next rank's. A rank may have no tokens,
    and may receive none; every rank of the group must call.

    Args:
        hidden_states: `[num_tokens, hidden]`.
        topk_ids: `[num_tokens, num_topk]`, global expert ids, -1 for none.
        topk_weights: `[num_tokens, num_topk]`.
        num_experts: Experts of all ranks.
        group: The ranks that share them.

    Returns:
        What this rank's experts have to compute, and the way back.

    Raises:
        ValueError: the experts cannot be divided evenly, or an id is not below `num_experts`.
    """
    world_size = dist.get_world_size(group)
    if num_experts % world_size:
        raise ValueError(
            f"dispatch: {num_experts} experts over {world_size} ranks, expected a multiple"
        )
    num_local = num_experts // world_size
    rank_of = torch.where(topk_ids < 0, -1, topk_ids // num_local)  # [num_tokens, num_topk]
    ranks = torch.arange(world_size, device=rank_of.device)
    is_sent = (rank_of[None] == ranks[:, None, None]).any(dim=-1)  # [world_size, num_tokens]
    destination, token = is_sent.nonzero(as_tuple=True)

    sent_counts = is_sent.sum(dim=1)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    highest = topk_ids.max() if topk_ids.numel() else sent_counts.new_tensor(-1)
    # One wait of the host for all that it has to know.
    *counts, highest_id = torch.cat([sent_counts, received_counts, highest.view(1)]).tolist()
    if highest_id >= num_experts:
        raise ValueError(f"dispatch: topk_ids holds {highest_id}, expected ids below {num_experts}")
    route = Route(
        num_tokens=hidden_states.shape[0],
        token_of_sent_row=token,
        sent_counts=tuple(counts[:world_size]),
        received_counts=tuple(counts[world_size:]),
    )

    is_local = rank_of[token] == destination[:, None]
    local_ids = torch.where(is_local, topk_ids[token] - destination[:, None] * num_local, -1).int()
    local_weights = torch.where(is_local, topk_weights[token].float(), 0.0)
    # One message for both: an id and a weight are four bytes each.
    routing = _exchange(
        torch.cat([local_ids, local_weights.view(torch.int32)], dim=-1), route, group
    )
    received_ids, received_weights = routing.chunk(2, dim=-1)
    arrived = Dispatched(
        hidden_states=_exchange(hidden_states[token], route, group),
        topk_ids=received_ids.contiguous(),
        topk_weights=received_weights.contiguous().view(torch.float32),
    )
    return arrived, route


def combine(expert_output: torch.Tensor, route: Route, *, group: dist.ProcessGroup) -> torch.Tensor:
    """Return each row to its token's rank and sum there.

    Args:
        expert_output: `[num_received, hidden]`, the weighted sum over this rank's experts for each
            row of `Dispatched`.
        route: From the `dispatch` that it answers.
        group: The same group.

    Returns:
        `[num_tokens, hidden]`, zero for a token without experts.

    Raises:
        ValueError: the rows are not those that arrived.

    Notes:
        Added in fp32 in the order of ranks: the same bits on every run.
    """
    if expert_output.shape[0] != sum(route.received_counts):
        raise ValueError(
            f"combine: expert_output has {expert_output.shape[0]} rows, expected the "
            f"{sum(route.received_counts)} that were dispatched here"
        )
    returned = _exchange(expert_output, route, group, backward=True)
    out = torch.zeros(
        route.num_tokens, expert_output.shape[1], dtype=torch.float32, device=expert_output.device
    )
    parts = zip(
        route.token_of_sent_row.split(route.sent_counts),
        returned.split(route.sent_counts),
        strict=True,
    )
    for token, rows in parts:
        # A token occurs once per rank, so this is no scatter with collisions.
        out[token] += rows.float()
    return out.to(expert_output.dtype)


def _exchange(
    rows: torch.Tensor, route: Route, group: dist.ProcessGroup, *, backward: bool = False
) -> torch.Tensor:
    """Send `rows`, grouped by destination, along the route; what arrives is grouped by source."""
    sent, received = route.sent_counts, route.received_counts
    if backward:
        sent, received = received, sent
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), [*received], [*sent], group=group)
    return out
