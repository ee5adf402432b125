"""An indexer's queries and keys, in the layout and precision that they are served in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cookbook.train_tiny.layers import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from cookbook.train_tiny.parameters import Parameters
    from sglang_glm.checkpoint.spec import CheckpointSpec

IndexParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_NORM_EPS = 1e-6
_E4M3_MAX = 448.0


def rotate_halves(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn the pairs ``(i, i + width / 2)``: the layout that GLM's indexer does not have.

    Args:
        x: ``[tokens, heads, width]``.
        table: From ``rope_table``, ``[tokens, 2, width / 2]``.

    Returns:
        The same shape and dtype.
    """
    first, second = x.float().chunk(2, -1)
    cos, sin = table[:, None, 0], table[:, None, 1]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round rows as the index cache stores keys: e4m3 with one power of two a row.

    Args:
        x: ``[tokens, width]``.

    Returns:
        The same shape and dtype; the gradient passes unrounded.
    """
    wide = x.detach().float()
    scale = (wide.abs().amax(-1, keepdim=True).clamp(min=1e-4) / _E4M3_MAX).log2().ceil().exp2()
    rounded = (wide / scale).to(torch.float8_e4m3fn).float() * scale
    return x + (rounded - wide).to(x.dtype)


def index_inputs(
    parameters: Parameters,
    layer: int,
    normed: torch.Tensor,
    q_latent: torch.Tensor,
    table: torch.Tensor,
    spec: CheckpointSpec,
    rows: torch.Tensor | None = None,
    *,
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = rotate,
    rounded: bool = False,
) -> IndexParts:
    """An indexer's queries, keys and head weights.

    Args:
        parameters: Of the model.
        layer: A layer with an indexer.
        normed: ``[tokens, hidden]``, the layer's normed input.
        q_latent: ``[tokens, q_lora_rank]``.
        table: From ``rope_table``.
        spec: Dimensions.
        rows: ``[queries]``, the tokens whose queries are wanted; all by default.
        turn: Applies RoPE.
        rounded: Whether keys are rounded as the cache stores them.

    Returns:
        ``[queries, index heads, width]``, ``[tokens, width]`` and ``[queries, index heads]``, the
        last with both constant factors of the score.
    """
    prefix = f"model.layers.{layer}.self_attn.indexer"
    rope = spec.qk_rope_head_dim
    k = F.linear(normed, parameters[f"{prefix}.wk.weight"]).float()
    weight, bias = (parameters[f"{prefix}.k_norm.{kind}"] for kind in ("weight", "bias"))
    k = F.layer_norm(k, k.shape[-1:], weight, bias, _NORM_EPS).to(normed.dtype)
    k = torch.cat([turn(k[:, None, :rope], table)[:, 0], k[:, rope:]], -1)
    if rounded:
        k = round_e4m3(k)
    if rows is not None:
        normed, q_latent, table = normed[rows], q_latent[rows], table[rows]
    q = F.linear(q_latent, parameters[f"{prefix}.wq_b.weight"])
    q = q.unflatten(-1, (spec.index_n_heads, -1))
    q = torch.cat([turn(q[..., :rope], table), q[..., rope:]], -1)
    weights = F.linear(normed, parameters[f"{prefix}.weights_proj.weight"]).float()
    return q, k, weights * (spec.index_n_heads * spec.index_head_dim) ** -0.5
