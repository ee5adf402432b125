"""Joining the partial attention of decode-context-parallel ranks on the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sglang_glm.parallel.history_stripes import merge_over_ranks

if TYPE_CHECKING:
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator


def cp_lse_ag_out_rs_mla(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: GroupCoordinator,
    ctx: Any = None,
    is_lse_base_on_e: bool = False,
) -> torch.Tensor:
    """Join `[num_tokens, num_heads, dim]` parts; returns `[num_heads / n, num_tokens, dim]`.

    Args:
        cp_attn_out: Attention over this rank's positions.
        cp_attn_lse: `[num_tokens, num_heads]`, base 2 unless `is_lse_base_on_e`.
        cp_group: The ranks that hold the history.
        ctx: State of SGLang's Triton form; unused.
        is_lse_base_on_e: Whether the logarithm is natural.
    """
    natural = cp_attn_lse.float() * (1.0 if is_lse_base_on_e else math.log(2.0))
    return merge_over_ranks(cp_attn_out, natural, cp_group)
