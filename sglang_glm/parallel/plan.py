"""Which rank holds what, and what ranks exchange in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig

Ranks = tuple[int, ...]
Operation = Literal["all_reduce", "gather", "scatter", "dispatch", "combine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange between ranks during a layer.

    Attributes:
        operation: "gather" brings every rank the rows of all attention groups, "scatter" sums and
            returns to each its own; "dispatch" and "combine" are an all-to-all by experts.
        place: Before or after which half of the layer.
        ranks: The ranks that take part, of one group.
    """

    operation: Operation
    place: Literal["after attention", "before mlp", "after mlp"]
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """One replica of a model over `tp_size` ranks, in SGLang's order of ranks.

    Attributes:
        config: The model's facts.
        tp_size: Ranks (`--tp`).
        attn_dp_size: Groups that attend to different requests (`--attn-dp-size`).
        ep_size: Ranks among which the experts are divided (`--ep-size`).
        all_to_all: Rows travel to their experts (`--moe-a2a-backend`); otherwise every rank sees
            all rows and the results are summed.
        dense_replicated: Each rank computes a whole dense MLP (`--moe-dense-tp-size 1`).

    Raises:
        ValueError: the sizes cannot be combined, or the model cannot be divided so; says which
            flag to change.
    """

    config: GlmDsaConfig
    tp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1
    all_to_all: bool = False
    dense_replicated: bool = False

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_model()

    def _check_sizes(self) -> None:
        for flag, size in (
            ("--tp", self.tp_size),
            ("--attn-dp-size", self.attn_dp_size),
            ("--ep-size", self.ep_size),
        ):
            if size < 1:
                raise ValueError(f"{flag} {size}: expected at least 1")
        for flag, size in (("--attn-dp-size", self.attn_dp_size), ("--ep-size", self.ep_size)):
            if self.tp_size % size:
                raise ValueError(
                    f"{flag} {size} with --tp {self.tp_size}: it divides the ranks into groups, "
                    f"so choose a divisor of {self.tp_size}"
                )
        if self.all_to_all and self.tp_size == 1:
            raise ValueError(
                "--moe-a2a-backend with --tp 1: there is no other rank to send to; leave the flag out"
            )
        if self.all_to_all and self.ep_size != self.tp_size:
            raise ValueError(
                f"--ep-size {self.ep_size} with --moe-a2a-backend and --tp {self.tp_size}: an all-to-all "
                f"divides the experts over all ranks, so choose --ep-size {self.tp_size} or leave it out"
            )

    def _check_model(self) -> None:
        dense_tp_size = 1 if self.dense_replicated else self.tp_size
        shared_tp_size = 1 if self.all_to_all else self.tp_size
        shared_width = self.config.moe_intermediate_size * self.config.n_shared_experts
        for what, size, ranks, flags in (
            (
                "num_attention_heads",
                self.config.num_attention_heads,
                self.attn_tp_size,
                "--tp or --attn-dp-size",
            ),
            ("n_routed_experts", self.config.n_routed_experts, self.ep_size, "--ep-size"),
            (
                "moe_intermediate_size",
                self.config.moe_intermediate_size,
                self.moe_tp_size,
                "--tp or --ep-size",
            ),
            (
                "the shared experts' width",
                shared_width,
                shared_tp_size,
                "--tp or --moe-a2a-backend",
            ),
            (
                "intermediate_size",
                self.config.intermediate_size,
                dense_tp_size,
                "--tp or --moe-dense-tp-size",
            ),
        ):
            if size % ranks:
                raise ValueError(
                    f"{what} {size} cannot be divided among {ranks} ranks: choose another {flags}"
                )

    @property
    def attn_tp_size(self) -> int:
        """Ranks that divide the heads of one request."""
        return self.tp_size // self.attn_dp_size

    @property
    def moe_tp_size(self) -> int:
        """Ranks that divide the width of one expert."""
        return self.tp_size // self.ep_size

    @property
    def attention_groups(self) -> tuple[Ranks, ...]:
        """Ranks that attend to the same requests, in order of their attention-DP rank."""
        return tuple(
            tuple(range(group * self.attn_tp_size, (group + 1) * self.attn_tp_size))
            for group in range(self.attn_dp_size)
        )

    @property
    def expert_groups(self) -> tuple[Ranks, ...]:
        """Ranks that together hold every expert once, each a part of its width."""
        return tuple(
            tuple(range(part, self.tp_size, self.moe_tp_size)) for part in range(self.moe_tp_size)
        )

    @property
    def expert_width_groups(self) -> tuple[Ranks, ...]:
        """Ranks that hold parts of the same experts."""
        return tuple(
            tuple(range(group * self.moe_tp_size, (group + 1) * self.moe_tp_size))
            for group in range(self.ep_size)
        )

    def heads(self, rank: int) -> range:
        """Attention heads that `rank` computes."""
        count = self.config.num_attention_heads // self.attn_tp_size
        start = rank % self.attn_tp_size * count
        return range(start, start + count)

    def experts(self, rank: int) -> range:
        """Routed experts that `rank` holds, of their width the share `1 / moe_tp_size`."""
        count = self.config.n_routed_experts // self.ep_size
        start = rank // self.moe_tp_size * count
        return range(start, start + count)

    def exchanges(self, layer_id: int, rank: int) -> tuple[Exchange, ...]:
        """What `rank` takes part in during one layer, in order; groups of one exchange nothing.

        SGLang may run a sum later, fused with the next norm, and may do it in two halves; the rows
        that arrive are these.
        """
        everyone = tuple(range(self.tp_size))
        attention = self.attention_groups[rank // self.attn_tp_size]
        sparse = self.config.is_moe_layer(layer_id)
        found = [Exchange(operation="all_reduce", place="after attention", ranks=attention)]
        if sparse and self.all_to_all:
            found.append(Exchange(operation="dispatch", place="before mlp", ranks=everyone))
            found.append(Exchange(operation="combine", place="after mlp", ranks=everyone))
            if self.attn_tp_size > 1:
                # Ranks of one group each dispatched a share of its rows.
                found.append(Exchange(operation="gather", place="after mlp", ranks=attention))
        elif sparse or not self.dense_replicated:
            if self.attn_dp_size == 1:
                found.append(Exchange(operation="all_reduce", place="after mlp", ranks=everyone))
            else:
                found.append(Exchange(operation="gather", place="before mlp", ranks=everyone))
                found.append(Exchange(operation="scatter", place="after mlp", ranks=everyone))
        return tuple(exchange for exchange in found if len(exchange.ranks) > 1)
