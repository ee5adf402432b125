"""The two norms before an MTP layer, at widths that SGLang's fused kernel does not take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable


def fused_eh_norm(
    original: Callable[..., torch.Tensor],
    inputs_embeds: torch.Tensor,
    previous_hidden: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """AROUND hook: the same in torch for a width or dtype that the kernel refuses.

    Args:
        original: SGLang's form: one kernel, fp16 or bf16, widths of 512 to 8,192 in steps of 256.
        inputs_embeds: `[tokens, hidden]`, the embeddings of the tokens.
        previous_hidden: `[tokens, hidden]`, the target's hidden states one position before.
        enorm_weight: `[hidden]`.
        hnorm_weight: `[hidden]`.
        eps: Of both norms.

    Returns:
        `[tokens, 2 * hidden]`: both normed, the embeddings first.
    """
    from sglang.kernels.ops.layernorm.fused_eh_norm import is_supported_fused_eh_norm_hidden_size

    hidden_size = inputs_embeds.shape[-1]
    half_precision = inputs_embeds.dtype in (torch.float16, torch.bfloat16)
    if half_precision and is_supported_fused_eh_norm_hidden_size(hidden_size):
        return original(inputs_embeds, previous_hidden, enorm_weight, hnorm_weight, eps)

    def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The kernel's arithmetic: one rounding, at the end.
        return rms_norm(rows.float(), (hidden_size,), weight.float(), eps).to(rows.dtype)

    return torch.cat((norm(inputs_embeds, enorm_weight), norm(previous_hidden, hnorm_weight)), -1)
