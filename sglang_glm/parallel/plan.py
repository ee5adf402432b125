"""Which rank holds what, and what ranks exchange in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.layout import ParallelLayout

Ranks = tuple[int, ...]
Operation = Literal["all_reduce", "gather", "scatter", "dispatch", "combine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange between ranks during a layer.

    Attributes:
        operation: "gather" brings every rank the rows that the others hold, "scatter" sums and
            returns to each its own; "dispatch" and "combine" are an all-to-all by experts.
        place: Before or after which half of the layer.
        ranks: The ranks that take part, of one group.
    """

    operation: Operation
    place: Literal["after attention", "before mlp", "after mlp"]
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """One replica of a model over the ranks of a layout, in SGLang's order of ranks.

    Attributes:
        config: The model's facts.
        layout: The sizes of its groups.

    Raises:
        ValueError: the model cannot be divided so; says which flag to change.
    """

    config: GlmDsaConfig
    layout: ParallelLayout

    def __post_init__(self) -> None:
        self.layout.check(self.config)

    @property
    def attention_groups(self) -> tuple[Ranks, ...]:
        """Ranks that attend to the same requests, in order of their attention-DP rank."""
        return tuple(
            tuple(range(group * self.layout.attn_tp_size, (group + 1) * self.layout.attn_tp_size))
            for group in range(self.layout.attn_dp_size)
        )

    @property
    def expert_groups(self) -> tuple[Ranks, ...]:
        """Ranks that together hold every expert once, each a part of its width."""
        return tuple(
            tuple(range(part, self.layout.tp_size, self.layout.moe_tp_size))
            for part in range(self.layout.moe_tp_size)
        )

    @property
    def expert_width_groups(self) -> tuple[Ranks, ...]:
        """Ranks that hold parts of the same experts."""
        return tuple(
            tuple(range(group * self.layout.moe_tp_size, (group + 1) * self.layout.moe_tp_size))
            for group in range(self.layout.ep_size)
        )

    def heads(self, rank: int) -> range:
        """Attention heads that `rank` computes."""
        count = self.config.num_attention_heads // self.layout.attn_tp_size
        start = rank % self.layout.attn_tp_size * count
        return range(start, start + count)

    def experts(self, rank: int) -> range:
        """Routed experts that `rank` holds, of their width the share `1 / moe_tp_size`."""
        count = self.config.n_routed_experts // self.layout.ep_size
        start = rank // self.layout.moe_tp_size * count
        return range(start, start + count)

    def exchanges(self, layer_id: int, rank: int) -> tuple[Exchange, ...]:
        """What `rank` takes part in during one layer, in order; groups of one exchange nothing.

        SGLang may run a sum later, fused with the next norm, and may do it in two halves; the rows
        that arrive are these.
        """
        everyone = tuple(range(self.layout.tp_size))
        attention = self.attention_groups[rank // self.layout.attn_tp_size]
        sparse = self.config.is_moe_layer(layer_id)
        found = [Exchange(operation="all_reduce", place="after attention", ranks=attention)]
        if sparse and self.layout.moe_dispatch == "all_to_all":
            found.append(Exchange(operation="dispatch", place="before mlp", ranks=everyone))
            found.append(Exchange(operation="combine", place="after mlp", ranks=everyone))
            if self.layout.attn_tp_size > 1:
                # Ranks of one group each dispatched a share of its rows.
                found.append(Exchange(operation="gather", place="after mlp", ranks=attention))
        elif sparse or not self.layout.dense_mlp_replicated:
            if self.layout.attn_dp_size == 1:
                found.append(Exchange(operation="all_reduce", place="after mlp", ranks=everyone))
            else:
                found.append(Exchange(operation="gather", place="before mlp", ranks=everyone))
                found.append(Exchange(operation="scatter", place="after mlp", ranks=everyone))
        return tuple(exchange for exchange in found if len(exchange.ranks) > 1)
