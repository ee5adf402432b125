"""A decoder layer as functions of its weights, so that ``torch.compile`` can take each whole.

Tokens of all sequences are one axis, ``[tokens, ...]`` with ``tokens = rows * length``. Experts are
one matrix whose hidden units are switched by the router, since eight small experts cost less
computed all than gathered. Nothing is absorbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from cookbook.train_tiny.parameters import Parameters
    from sglang_glm.checkpoint.spec import CheckpointSpec


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in FP32, result in ``x.dtype``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_table(positions: torch.Tensor, spec: CheckpointSpec) -> torch.Tensor:
    """Cosines and sines.

    Args:
        positions: ``[tokens]``.
        spec: Gives width and base.

    Returns:
        ``[tokens, 2, qk_rope_head_dim / 2]``, FP32.
    """
    width = spec.qk_rope_head_dim
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] / spec.rope_theta ** (steps / width)
    return torch.stack([angles.cos(), angles.sin()], 1)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn interleaved pairs.

    Args:
        x: ``[tokens, heads, width]``.
        table: From :func:`rope_table`, ``[tokens, 2, width / 2]``.

    Returns:
        The same shape and dtype, pairs de-interleaved, which no dot product of two such tensors
        can see.
    """
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = table[:, None, 0], table[:, None, 1]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


def attention_weights(parameters: Parameters, layer: int) -> tuple[torch.Tensor, ...]:
    """List a layer's weights in the order that :func:`project` takes them, then ``o_proj``."""
    prefix = f"model.layers.{layer}"
    names = (
        "input_layernorm",
        "self_attn.q_a_proj",
        "self_attn.q_a_layernorm",
        "self_attn.q_b_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
        "self_attn.kv_b_proj",
    )
    return tuple(parameters[f"{prefix}.{name}.weight"] for name in names)


def project(
    x: torch.Tensor,
    table: torch.Tensor,
    input_norm: torch.Tensor,
    q_a: torch.Tensor,
    q_a_norm: torch.Tensor,
    q_b: torch.Tensor,
    kv_a: torch.Tensor,
    kv_a_norm: torch.Tensor,
    kv_b: torch.Tensor,
    heads: int,
    rope: int,
    value: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Everything before attention.

    Args:
        x: ``[tokens, hidden]``, the residual stream.
        table: From :func:`rope_table`.
        input_norm: ``[hidden]``, of ``input_layernorm``; this and the next as
            :func:`attention_weights` lists them.
        q_a: ``[q_lora_rank, hidden]``.
        q_a_norm: ``[q_lora_rank]``.
        q_b: ``[heads * (nope + rope), q_lora_rank]``.
        kv_a: ``[kv_lora_rank + rope, hidden]``.
        kv_a_norm: ``[kv_lora_rank]``.
        kv_b: ``[heads * (nope + value), kv_lora_rank]``.
        heads: Attention heads.
        rope: Width of the rotated part.
        value: Width of a value.
        eps: Of all norms.

    Returns:
        Queries, keys ``[tokens, heads, nope + rope]``, values ``[tokens, heads, value]``, the
        normed input ``[tokens, hidden]`` and the normed query latent.
    """
    normed = rms_norm(x, input_norm, eps)
    q_latent = rms_norm(F.linear(normed, q_a), q_a_norm, eps)
    q = F.linear(q_latent, q_b).unflatten(-1, (heads, -1))
    compressed = F.linear(normed, kv_a)
    latent = rms_norm(compressed[:, :-rope], kv_a_norm, eps)
    k_rope = rotate(compressed[:, None, -rope:], table)
    kv = F.linear(latent, kv_b).unflatten(-1, (heads, -1))
    q = torch.cat([q[..., :-rope], rotate(q[..., -rope:], table)], -1)
    k = torch.cat([kv[..., :-value], k_rope.expand(-1, heads, -1)], -1)
    return q, k, kv[..., -value:], normed, q_latent


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU up to its last matrix."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def dense_tail(
    x: torch.Tensor,
    attended: torch.Tensor,
    o: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Everything after attention in a dense layer.

    Args:
        x: ``[tokens, hidden]``, the residual stream before the layer.
        attended: ``[tokens, heads * value]``.
        o: And the other weights of the layer.
        norm: Of ``post_attention_layernorm``.
        gate: ``[width, hidden]``.
        up: ``[width, hidden]``.
        down: ``[hidden, width]``.
        eps: Of the norm.

    Returns:
        The residual stream after the layer.
    """
    x = x + F.linear(attended, o)
    return x + F.linear(gated(rms_norm(x, norm, eps), gate, up), down)


def moe_tail(
    x: torch.Tensor,
    attended: torch.Tensor,
    o: torch.Tensor,
    norm: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    shared_gate: torch.Tensor,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
    top_k: int,
    scale: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything after attention in a MoE layer.

    Args:
        x: ``[tokens, hidden]``, the residual stream before the layer.
        attended: ``[tokens, heads * value]``.
        o: And the other weights of the layer.
        norm: Of ``post_attention_layernorm``.
        router: ``[experts, hidden]``.
        bias: ``[experts]``, used to choose only.
        gate: ``[experts * width, hidden]``.
        up: The same.
        down: ``[hidden, experts * width]``.
        shared_gate: Of the shared expert.
        shared_up: The same.
        shared_down: The same.
        top_k: Experts a token.
        scale: ``routed_scaling_factor``.
        eps: Of the norm.

    Returns:
        The residual stream after the layer, and each expert's share of the tokens.
    """
    x = x + F.linear(attended, o)
    normed = rms_norm(x, norm, eps)
    with torch.autocast(x.device.type, enabled=False):
        scores = F.linear(normed.float(), router).sigmoid()
        chosen = (scores + bias).topk(top_k, -1).indices
        switch = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * switch
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    units = gated(normed, gate, up).unflatten(-1, (router.shape[0], -1))
    routed = F.linear((units * weights[..., None].to(units.dtype)).flatten(-2), down)
    shared = F.linear(gated(normed, shared_gate, shared_up), shared_down)
    return x + routed + shared, switch.mean(0)
