"""How one model is spread over GPUs, and which mixes are impossible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig

MoeDispatch = Literal["none", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel groups, with SGLang's meaning of each flag.

    Attributes:
        tp_size: GPUs of one replica (`--tp`). All other sizes divide it.
        attn_dp_size: Groups that hold different requests during attention (`--attn-dp-size`).
        ep_size: Groups that hold different experts (`--ep`).
        dcp_size: Ranks of an attention-TP group that each hold a share of the latent rows
            (`--dcp-size`); index keys and the draft's cache stay whole on every rank.
        moe_dispatch: "all_to_all" sends tokens to their experts' ranks (`--moe-a2a-backend`);
            "none" shows every token to every rank and reduces.
        dense_mlp_replicated: The first dense layers are not split (`--moe-dense-tp-size 1`).
        lm_head_per_attn_group: The head is split within an attention-TP group only
            (`--enable-dp-lm-head`).
        gpus_per_node: GPUs joined by the fast link.
    """

    tp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1
    dcp_size: int = 1
    moe_dispatch: MoeDispatch = "none"
    dense_mlp_replicated: bool = False
    lm_head_per_attn_group: bool = False
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("tp_size", "attn_dp_size", "ep_size", "dcp_size", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ParallelLayout: {name} is {getattr(self, name)}, expected at least 1"
                )
        self._divides("attn_dp_size", self.attn_dp_size, "tp_size", self.tp_size)
        self._divides("ep_size", self.ep_size, "tp_size", self.tp_size)
        self._divides("dcp_size", self.dcp_size, "tp_size / attn_dp_size", self.attn_tp_size)
        if self.moe_dispatch == "all_to_all" and self.ep_size != self.tp_size:
            raise ValueError(
                f"ParallelLayout: ep_size is {self.ep_size} with an all-to-all dispatch, expected "
                f"tp_size={self.tp_size}: every rank sends to and receives from all experts"
            )
        if self.tp_size > self.gpus_per_node and self.tp_size % self.gpus_per_node:
            raise ValueError(
                f"ParallelLayout: tp_size is {self.tp_size}, expected a multiple of "
                f"gpus_per_node={self.gpus_per_node} once it spans nodes"
            )

    @staticmethod
    def _divides(name: str, size: int, whole_name: str, whole: int) -> None:
        if whole % size:
            raise ValueError(
                f"ParallelLayout: {name} is {size}, expected a divisor of {whole_name}={whole}"
            )

    @property
    def attn_tp_size(self) -> int:
        """GPUs that split the heads of one request."""
        return self.tp_size // self.attn_dp_size

    @property
    def moe_tp_size(self) -> int:
        """GPUs that split one expert."""
        return self.tp_size // self.ep_size

    @property
    def num_nodes(self) -> int:
        """Machines of one replica."""
        return max(1, self.tp_size // self.gpus_per_node)

    @property
    def shared_experts_tp_size(self) -> int:
        """GPUs that split the shared expert: one under an all-to-all, where tokens stay local."""
        return 1 if self.moe_dispatch == "all_to_all" else self.tp_size

    @property
    def dense_mlp_tp_size(self) -> int:
        """GPUs that split the MLP of the dense layers."""
        return 1 if self.dense_mlp_replicated else self.tp_size

    @property
    def lm_head_tp_size(self) -> int:
        """GPUs that split the vocabulary of the head."""
        return self.attn_tp_size if self.lm_head_per_attn_group else self.tp_size

    def check(self, config: GlmDsaConfig) -> None:
        """Refuse a layout that cannot hold this model.

        Args:
            config: The model.

        Raises:
            ValueError: One sentence with the two numbers that do not fit.
        """
        splits = (
            ("num_attention_heads", config.num_attention_heads, "attention TP", self.attn_tp_size),
            ("n_routed_experts", config.n_routed_experts, "ep_size", self.ep_size),
            ("moe_intermediate_size", config.moe_intermediate_size, "MoE TP", self.moe_tp_size),
            ("intermediate_size", config.intermediate_size, "dense TP", self.dense_mlp_tp_size),
            (
                "moe_intermediate_size x n_shared_experts",
                config.moe_intermediate_size * config.n_shared_experts,
                "shared-expert TP",
                self.shared_experts_tp_size,
            ),
        )
        for name, size, group, parts in splits:
            if size % parts:
                raise ValueError(
                    f"ParallelLayout: {name}={size} cannot be split over {group}={parts}; choose "
                    "sizes that divide it"
                )
