"""Sizes of the groups that one model is divided over, and which mixes are impossible."""

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

    Raises:
        ValueError: the sizes cannot be combined; says which flag to change.
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
        for flag, size in (
            ("--tp", self.tp_size),
            ("--attn-dp-size", self.attn_dp_size),
            ("--ep-size", self.ep_size),
            ("--dcp-size", self.dcp_size),
            ("gpus_per_node", self.gpus_per_node),
        ):
            if size < 1:
                raise ValueError(f"{flag} {size}: expected at least 1")
        for flag, size in (("--attn-dp-size", self.attn_dp_size), ("--ep-size", self.ep_size)):
            if self.tp_size % size:
                raise ValueError(
                    f"{flag} {size} with --tp {self.tp_size}: it divides the ranks into groups, "
                    f"so choose a divisor of {self.tp_size}"
                )
        if self.attn_tp_size % self.dcp_size:
            raise ValueError(
                f"--dcp-size {self.dcp_size} with {self.attn_tp_size} ranks in an attention group "
                f"(--tp {self.tp_size}, --attn-dp-size {self.attn_dp_size}): they share the history "
                f"of a request, so choose a divisor of {self.attn_tp_size}"
            )
        self._check_all_to_all()
        if self.tp_size > self.gpus_per_node and self.tp_size % self.gpus_per_node:
            raise ValueError(
                f"--tp {self.tp_size} over nodes of {self.gpus_per_node} GPUs: expected whole nodes, "
                f"a multiple of {self.gpus_per_node}"
            )

    def _check_all_to_all(self) -> None:
        if self.moe_dispatch == "none":
            return
        if self.tp_size == 1:
            raise ValueError(
                "--moe-a2a-backend with --tp 1: there is no other rank to send to; leave the flag out"
            )
        if self.ep_size != self.tp_size:
            raise ValueError(
                f"--ep-size {self.ep_size} with --moe-a2a-backend and --tp {self.tp_size}: an all-to-all "
                f"divides the experts over all ranks, so choose --ep-size {self.tp_size} or leave it out"
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
            ValueError: a dimension cannot be divided so; says which flag to change.
        """
        shared_width = config.moe_intermediate_size * config.n_shared_experts
        for name, size, parts, flags in (
            (
                "num_attention_heads",
                config.num_attention_heads,
                self.attn_tp_size,
                "--tp or --attn-dp-size",
            ),
            ("n_routed_experts", config.n_routed_experts, self.ep_size, "--ep-size"),
            (
                "moe_intermediate_size",
                config.moe_intermediate_size,
                self.moe_tp_size,
                "--tp or --ep-size",
            ),
            (
                "the shared experts' width",
                shared_width,
                self.shared_experts_tp_size,
                "--tp or --moe-a2a-backend",
            ),
            (
                "intermediate_size",
                config.intermediate_size,
                self.dense_mlp_tp_size,
                "--tp or --moe-dense-tp-size",
            ),
        ):
            if size % parts:
                raise ValueError(
                    f"{name} {size} cannot be divided among {parts} ranks: choose another {flags}"
                )
