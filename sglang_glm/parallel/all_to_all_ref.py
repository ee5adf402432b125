"""What dispatch and combine do, in one process: loops over every rank, token and expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def dispatch_ref(
    hidden_states: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    num_experts: int,
) -> list[list[tuple[int, int, torch.Tensor, list[int], list[float]]]]:
    """Rows that each rank receives.

    Args:
        hidden_states: Of each rank, `[num_tokens, hidden]`.
        topk_ids: Of each rank, `[num_tokens, num_topk]`, global ids, -1 for none.
        topk_weights: Of each rank, `[num_tokens, num_topk]`.
        num_experts: Experts of all ranks.

    Returns:
        For each receiving rank its rows, in order: source rank, token there, `[hidden]`, local
        expert ids with -1 elsewhere, weights with 0 elsewhere.
    """
    world_size = len(hidden_states)
    num_local = num_experts // world_size
    received: list[list[tuple[int, int, torch.Tensor, list[int], list[float]]]] = []
    for receiver in range(world_size):
        own = range(receiver * num_local, (receiver + 1) * num_local)
        rows = []
        for source in range(world_size):
            for token in range(hidden_states[source].shape[0]):
                ids = topk_ids[source][token].tolist()
                weights = topk_weights[source][token].tolist()
                if any(expert in own for expert in ids):
                    local = [expert - own.start if expert in own else -1 for expert in ids]
                    kept = [
                        w if expert in own else 0.0 for expert, w in zip(ids, weights, strict=True)
                    ]
                    rows.append((source, token, hidden_states[source][token], local, kept))
        received.append(rows)
    return received


def moe_ref(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """What dispatch, experts and combine must give together, with linear experts.

    ::

        out[t] = sum_j topk_weights[t, j] * experts[topk_ids[t, j]] @ hidden_states[t]

    Args:
        hidden_states: `[num_tokens, hidden]`.
        topk_ids: `[num_tokens, num_topk]`, -1 for none.
        topk_weights: `[num_tokens, num_topk]`.
        experts: `[num_experts, hidden, hidden]`.

    Returns:
        `[num_tokens, hidden]` fp32.
    """
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token in range(hidden_states.shape[0]):
        for expert, weight in zip(
            topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True
        ):
            if expert >= 0:
                out[token] += weight * (experts[expert].float() @ hidden_states[token].float())
    return out
