"""A forward of ``glm_moe_dsa`` made for training: fast, plain torch, transformers' numbers.

``tests/unit/test_train_tiny.py`` compares logits with transformers', dense and sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.index_scores import index_scores
from cookbook.train_tiny.indexer import index_inputs
from cookbook.train_tiny.layers import (
    attention_weights,
    dense_tail,
    moe_tail,
    project,
    rms_norm,
    rope_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cookbook.train_tiny.indexer import IndexParts
    from cookbook.train_tiny.parameters import Parameters
    from sglang_glm.checkpoint.spec import CheckpointSpec


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
    """The parameters, and the ways through them.

    Attributes:
        index_inputs: Gives queries and keys of the indexers; others are put here to see what a
            fault of the serving path does.
        index_topk: Positions that a query attends to.
    """

    def __init__(self, spec: CheckpointSpec, parameters: Parameters) -> None:
        """Hold both.

        Args:
            spec: Dimensions.
            parameters: As from :func:`init_parameters`.
        """
        self.spec = spec
        self.parameters = parameters
        self.parts = {"project": project, "dense_tail": dense_tail, "moe_tail": moe_tail}
        self.index_inputs: Callable[..., IndexParts] = index_inputs
        self.index_topk = spec.index_topk

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
        q, k, weights = self.index_inputs(
            self.parameters, layer, normed, q_latent, table, self.spec
        )
        scores = index_scores(*(part.unflatten(0, (rows, -1)) for part in (q, k, weights)))
        length = scores.shape[1]
        kept = min(self.index_topk, length)
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
