"""Masked attention as two products over the whole context; serves CPU traffic."""

import torch

from glm_kernels.cache.layout import KV_LORA_RANK

# Bounds the [rows, heads, context] scores of one chunk of rows.
CHUNK_BYTES = 64 << 20


def masked_mla_torch(
    q: torch.Tensor,
    latents: torch.Tensor,
    row_lengths: torch.Tensor,
    softmax_scale: float,
    topk_positions: torch.Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectorised form of ``masked_mla``; arguments as there. A chunk has at least one row."""
    num_rows, num_heads, _ = q.shape
    context = latents.shape[0]
    keys = latents.float()
    values = keys[:, :KV_LORA_RANK]
    position = torch.arange(context, device=q.device)
    out = torch.empty(num_rows, num_heads, KV_LORA_RANK, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, device=q.device)
    step = max(1, chunk_bytes // max(1, 4 * num_heads * context))
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        hidden = position >= row_lengths[part, None]  # [rows, context]
        if topk_positions is not None:
            hidden |= ~_selected(topk_positions[part], context)
        scores = (q[part].float().flatten(0, 1) @ keys.T).mul_(softmax_scale)
        scores = scores.view(-1, num_heads, context).masked_fill_(hidden[:, None], float("-inf"))
        norm = scores.logsumexp(-1)  # [rows, heads]
        lse[part] = norm
        # A row that sees nothing would subtract -inf from -inf.
        weights = scores.sub_(norm.masked_fill(norm == float("-inf"), 0.0)[..., None]).exp_()
        out[part] = (weights.flatten(0, 1) @ values).view(-1, num_heads, KV_LORA_RANK).to(q.dtype)
    return out, lse


def _selected(topk_positions: torch.Tensor, context: int) -> torch.Tensor:
    """``[num_rows, context]`` bool: which positions a row selected."""
    # One column more than the context takes the padding entries.
    mask = torch.zeros(
        topk_positions.shape[0], context + 1, dtype=torch.bool, device=topk_positions.device
    )
    target = topk_positions.masked_fill(topk_positions < 0, context).long()
    return mask.scatter_(1, target, True)[:, :context]
