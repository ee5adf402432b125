"""What the planner says of an exchange, beside which it is measured."""

from __future__ import annotations

from sglang_glm.planning.collectives import forward_collectives
from sglang_glm.planning.hardware import find_gpu
from sglang_glm.planning.layout import ParallelLayout
from sglang_glm.planning.released import load_config


def predicted(operation: str, world_size: int, num_tokens: int) -> dict[str, float]:
    """Bytes that one GPU sends and µs that they take, of one layer's dispatch or combine.

    Args:
        operation: "dispatch" (FP8) or "combine" (BF16).
        world_size: Ranks, each with its own requests and share of the experts.
        num_tokens: Tokens of all ranks.
    """
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
    time_us = call.time_us(find_gpu("h200"), layout.gpus_per_node) / call.count
    return {
        "predicted_bytes": round(call.sent_bytes_per_gpu),
        "predicted_us": round(time_us, 2),
    }
