"""A forward of ``glm_moe_dsa`` made for training: fast, plain torch, transformers' numbers.

Tokens of all sequences are one axis, ``[tokens, ...]`` with ``tokens = rows * length``, except in
attention. Experts are one matrix whose hidden units are switched by the router, since eight small
experts cost less computed all than gathered. Nothing is absorbed. ``tests/unit/test_train_tiny.py``
compares logits with transformers', dense and sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.index_scores import index_scores
from sglang_glm.checkpoint.tensors import model_tensors

if TYPE_CHECKING:
    from sglang_glm.checkpoint.spec import CheckpointSpec

Parameters = dict[str, torch.Tensor]

_INDEX_NORM_EPS = 1e-6


def init_parameters(spec: CheckpointSpec, seed: int, device: str) -> Parameters:
    """Draw the initial parameters.

    Args:
        spec: Dimensions.
        seed: Of the draw.
        device: Where they live.

    Returns:
        Checkpoint name to FP32 parameter; each layer's experts are stacked under
        ``mlp.experts.gate_proj``, ``up_proj`` ``[experts * width, hidden]`` and ``down_proj``
        ``[hidden, experts * width]``.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: Parameters = {}
    depth = 2 * (spec.num_hidden_layers + 1)
    for tensor in model_tensors(spec):
        if tensor.kind == "norm":
            value = torch.ones(tensor.shape)
        elif tensor.kind in ("shift", "router_bias"):
            value = torch.zeros(tensor.shape)
        else:
            value = torch.randn(tensor.shape, generator=generator)
            if tensor.kind == "embedding":
                value *= 0.5
            else:
                value *= tensor.shape[1] ** -0.5
                if tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
                    value *= depth**-0.5
                elif tensor.name == "lm_head.weight":
                    value *= 0.3
        drawn[tensor.name] = value
    return {name: value.to(device).requires_grad_() for name, value in stack(drawn, spec).items()}


def stack(tensors: Parameters, spec: CheckpointSpec) -> Parameters:
    """Join each layer's experts.

    Args:
        tensors: Names as in a checkpoint.
        spec: Dimensions.

    Returns:
        Names as in :func:`init_parameters`.
    """
    joined = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for layer in range(spec.num_hidden_layers + 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.0.gate_proj.weight" not in tensors:
            continue
        for role, axis in (("gate", 0), ("up", 0), ("down", 1)):
            parts = [
                tensors[f"{prefix}.{expert}.{role}_proj.weight"]
                for expert in range(spec.n_routed_experts)
            ]
            joined[f"{prefix}.{role}_proj"] = torch.cat(parts, axis)
    return joined


def unstack(tensors: Parameters, spec: CheckpointSpec) -> Parameters:
    """Undo :func:`stack`."""
    split: Parameters = {}
    for name, value in tensors.items():
        prefix, _, role = name.rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            split[name] = value
            continue
        axis = 1 if role == "down_proj" else 0
        for expert, part in enumerate(value.chunk(spec.n_routed_experts, axis)):
            split[f"{prefix}.{expert}.{role}.weight"] = part
    return split


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


def index_inputs(
    parameters: Parameters,
    layer: int,
    normed: torch.Tensor,
    q_latent: torch.Tensor,
    table: torch.Tensor,
    spec: CheckpointSpec,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An indexer's queries, keys and head weights.

    Args:
        parameters: Of the model.
        layer: A layer with an indexer.
        normed: ``[tokens, hidden]``, the layer's normed input.
        q_latent: ``[tokens, q_lora_rank]``.
        table: From :func:`rope_table`.
        spec: Dimensions.
        rows: ``[queries]``, the tokens whose queries are wanted; all by default.

    Returns:
        ``[queries, index heads, width]``, ``[tokens, width]`` and ``[queries, index heads]``, the
        last with both constant factors of the score.
    """
    prefix = f"model.layers.{layer}.self_attn.indexer"
    rope = spec.qk_rope_head_dim
    k = F.linear(normed, parameters[f"{prefix}.wk.weight"]).float()
    weight, bias = (parameters[f"{prefix}.k_norm.{kind}"] for kind in ("weight", "bias"))
    k = F.layer_norm(k, k.shape[-1:], weight, bias, _INDEX_NORM_EPS).to(normed.dtype)
    k = torch.cat([rotate(k[:, None, :rope], table)[:, 0], k[:, rope:]], -1)
    if rows is not None:
        normed, q_latent, table = normed[rows], q_latent[rows], table[rows]
    q = F.linear(q_latent, parameters[f"{prefix}.wq_b.weight"])
    q = q.unflatten(-1, (spec.index_n_heads, -1))
    q = torch.cat([rotate(q[..., :rope], table), q[..., rope:]], -1)
    weights = F.linear(normed, parameters[f"{prefix}.weights_proj.weight"]).float()
    return q, k, weights * (spec.index_n_heads * spec.index_head_dim) ** -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """What one layer leaves for the indexer's loss.

    Attributes:
        q: ``[tokens, heads, width]``.
        k: The same.
        v: ``[tokens, heads, value]``.
        normed: ``[tokens, hidden]``.
        q_latent: ``[tokens, q_lora_rank]``.
        mask: ``[rows, length, length]``, bool, the selection that it used; None if dense.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    normed: torch.Tensor
    q_latent: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class Output:
    """Of a forward.

    Attributes:
        hidden: ``[tokens, hidden]``, after the final norm.
        traces: One a layer; the MTP layer's last if it ran.
        loads: MoE layer to each expert's share of the tokens.
    """

    hidden: torch.Tensor
    traces: list[LayerTrace]
    loads: dict[int, torch.Tensor]


class Model:
    """The parameters, and the ways through them."""

    def __init__(self, spec: CheckpointSpec, parameters: Parameters) -> None:
        """Hold both.

        Args:
            spec: Dimensions.
            parameters: As from :func:`init_parameters`.
        """
        self.spec = spec
        self.parameters = parameters
        self.parts = {"project": project, "dense_tail": dense_tail, "moe_tail": moe_tail}

    def compile_parts(self) -> None:
        """Let torch compile the functions that hold nearly all the time outside attention."""
        self.parts = {name: torch.compile(part, dynamic=False) for name, part in self.parts.items()}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the head: ``[tokens, vocab_size]``."""
        return F.linear(hidden, self.parameters["lm_head.weight"])

    def project(self, layer: int, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As :func:`project`, for one layer."""
        spec = self.spec
        return self.parts["project"](
            x,
            table,
            *attention_weights(self.parameters, layer),
            spec.num_attention_heads,
            spec.qk_rope_head_dim,
            spec.v_head_dim,
            spec.rms_norm_eps,
        )

    def tail(
        self, layer: int, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Everything after attention: the stream, and the experts' loads of a MoE layer."""
        spec, prefix = self.spec, f"model.layers.{layer}"

        def weight(name: str) -> torch.Tensor:
            return self.parameters[f"{prefix}.{name}"]

        head = (weight("self_attn.o_proj.weight"), weight("post_attention_layernorm.weight"))
        roles = ("gate_proj", "up_proj", "down_proj")
        if not spec.is_moe_layer(layer):
            matrices = (weight(f"mlp.{role}.weight") for role in roles)
            return self.parts["dense_tail"](x, attended, *head, *matrices, spec.rms_norm_eps), None
        return self.parts["moe_tail"](
            x,
            attended,
            *head,
            weight("mlp.gate.weight"),
            weight("mlp.gate.e_score_correction_bias"),
            *(weight(f"mlp.experts.{role}") for role in roles),
            *(weight(f"mlp.shared_experts.{role}.weight") for role in roles),
            spec.num_experts_per_tok,
            spec.routed_scaling_factor,
            spec.rms_norm_eps,
        )

    @torch.no_grad()
    def select(
        self,
        layer: int,
        normed: torch.Tensor,
        q_latent: torch.Tensor,
        table: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        """Choose positions.

        Args:
            layer: A layer with an indexer.
            normed: ``[tokens, hidden]``.
            q_latent: ``[tokens, q_lora_rank]``.
            table: From :func:`rope_table`.
            rows: Sequences.

        Returns:
            ``[rows, length, length]``, bool: whether a query attends to a key.
        """
        q, k, weights = index_inputs(self.parameters, layer, normed, q_latent, table, self.spec)
        scores = index_scores(*(part.unflatten(0, (rows, -1)) for part in (q, k, weights)))
        length = scores.shape[1]
        kept = min(self.spec.index_topk, length)
        chosen = scores.topk(kept, -1, sorted=False).indices
        mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        mask.scatter_(-1, chosen, True)
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril_()
        return mask.logical_and_(causal)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: int,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of all heads: ``[tokens, heads * value]``."""
        q, k, v = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (q, k, v))
        scale = self.spec.qk_head_dim**-0.5
        if mask is None:
            # The flash kernel wants values as wide as keys.
            wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
            out = F.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scale)
            out = out[..., : v.shape[-1]]
        else:
            bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            bias.masked_fill_(~mask, float("-inf"))
            bias = bias[:, None].expand(-1, q.shape[1], -1, -1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def layer(
        self,
        layer: int,
        x: torch.Tensor,
        table: torch.Tensor,
        rows: int,
        mask: torch.Tensor | None,
        sparse: bool,
    ) -> tuple[torch.Tensor, LayerTrace, torch.Tensor | None]:
        """Run one layer.

        Args:
            layer: Its index; ``num_hidden_layers`` is the MTP layer.
            x: ``[tokens, hidden]``.
            table: From :func:`rope_table`.
            rows: Sequences.
            mask: The selection of the layer before, for a shared layer.
            sparse: Whether to attend to the selection only.

        Returns:
            The stream, the trace, and the experts' loads.
        """
        q, k, v, normed, q_latent = self.project(layer, x, table)
        if not sparse:
            mask = None
        elif self.spec.has_indexer(layer):
            mask = self.select(layer, normed, q_latent, table, rows)
        x, load = self.tail(layer, x, self.attend(q, k, v, rows, mask))
        trace = LayerTrace(q=q, k=k, v=v, normed=normed, q_latent=q_latent, mask=mask)
        return x, trace, load

    def forward(
        self,
        ids: torch.Tensor,
        *,
        sparse: bool,
    ) -> Output:
        """Run the decoder layers.

        Args:
            ids: ``[rows, length]``.
            sparse: Whether to attend to selections only.

        Returns:
            The output.
        """
        rows, length = ids.shape
        spec, parameters = self.spec, self.parameters
        positions = torch.arange(length, device=ids.device).repeat(rows)
        table = rope_table(positions, spec)
        x = F.embedding(ids.flatten(), parameters["model.embed_tokens.weight"])
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        output = Output(hidden=x, traces=[], loads={})
        mask = None
        for layer in range(spec.num_hidden_layers):
            x, trace, load = self.layer(layer, x, table, rows, mask, sparse)
            mask = trace.mask
            output.traces.append(trace)
            if load is not None:
                output.loads[layer] = load
        output.hidden = rms_norm(x, parameters["model.norm.weight"], spec.rms_norm_eps)
        return output

    def nextn_input(self, hidden: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Join a hidden state with the token after it.

        Args:
            hidden: ``[tokens, hidden]``, after a final norm.
            next_ids: ``[tokens]``.

        Returns:
            ``[tokens, hidden]``, the MTP layer's stream.
        """
        spec = self.spec
        prefix = f"model.layers.{spec.num_hidden_layers}"
        enorm, hnorm, eh_proj = (
            self.parameters[f"{prefix}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")
        )
        embeds = F.embedding(next_ids, self.parameters["model.embed_tokens.weight"])
        embeds = embeds.to(hidden.dtype)
        eps = spec.rms_norm_eps
        pair = torch.cat([rms_norm(embeds, enorm, eps), rms_norm(hidden, hnorm, eps)], -1)
        return F.linear(pair, eh_proj)

    def nextn_norm(self, x: torch.Tensor) -> torch.Tensor:
        """The MTP layer's final norm."""
        name = f"model.layers.{self.spec.num_hidden_layers}.shared_head.norm.weight"
        return rms_norm(x, self.parameters[name], self.spec.rms_norm_eps)
