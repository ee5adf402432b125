"""What is predicted of an exchange, beside which it is measured: of its own form, and of the planner."""

from __future__ import annotations

from math import comb
from typing import Literal

from sglang_glm.planning.collectives import forward_collectives
from sglang_glm.planning.hardware import COLLECTIVE_LATENCY_US, find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config

#: A token travels once to every rank that holds one of its experts, or once to every expert.
Copies = Literal["rank", "expert"]


def predicted(
    operation: str, world_size: int, num_tokens: int, *, copies: Copies, row_bytes: float
) -> dict[str, float]:
    """Bytes that one GPU sends and µs that they take, of one layer's dispatch or combine.

    Args:
        operation: "dispatch" or "combine".
        world_size: Ranks, each with its own requests and share of the experts.
        num_tokens: Tokens of all ranks.
        copies: Of a token.
        row_bytes: One copy with what goes along.

    Returns:
        `predicted_bytes` and `predicted_us` of this form; `plan_bytes` and `plan_us` of the planner,
        which counts a copy an expert, FP8 out and BF16 back.
    """
    gpu = find_gpu("h200")
    sent = num_tokens / world_size * copies_to_others(world_size, copies) * row_bytes
    layout = ParallelLayout(
        tp_size=world_size,
        attn_dp_size=world_size,
        ep_size=world_size,
        moe_dispatch="all_to_all",
    )
    calls = forward_collectives(
        load_config("zai-org/GLM-5.3"), layout, num_tokens=num_tokens, num_logit_rows=0
    )
    call = next(call for call in calls if call.name == operation)
    return {
        "predicted_bytes": round(sent),
        "predicted_us": round(COLLECTIVE_LATENCY_US + 1e6 * sent / gpu.link_bytes_per_s, 2),
        "plan_bytes": round(call.sent_bytes_per_gpu),
        "plan_us": round(call.time_us(gpu, layout.gpus_per_node) / call.count, 2),
    }


def copies_to_others(world_size: int, copies: Copies) -> float:
    """Copies of a token that leave its rank, on average over experts drawn evenly."""
    config = load_config("zai-org/GLM-5.3")
    others, experts, chosen = world_size - 1, config.n_routed_experts, config.num_experts_per_tok
    if copies == "expert":
        return chosen * others / world_size
    # A rank gets none where all are among the other ranks' experts.
    missed = comb(experts - experts // world_size, chosen) / comb(experts, chosen)
    return others * (1 - missed)
