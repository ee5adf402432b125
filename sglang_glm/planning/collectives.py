"""Every collective of a forward pass: what is sent, how much, and how long the link needs.

Message sizes count what the operation moves over all GPUs, the convention in which published
figures are given. Times use what one GPU sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_glm.planning.hardware import COLLECTIVE_LATENCY_US, NETWORK_LATENCY_US

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.hardware import Gpu
    from sglang_glm.planning.layout import ParallelLayout

_BYTES_BF16 = 2
_BYTES_FP8 = 1


def hidden_message_bytes(config: GlmDsaConfig, num_tokens: float) -> float:
    """BF16 hidden states of `num_tokens`: an all-reduce, a gather or a scatter moves this."""
    return num_tokens * config.hidden_size * _BYTES_BF16


def dispatch_message_bytes(config: GlmDsaConfig, num_tokens: float) -> float:
    """FP8 hidden states sent to every chosen expert; duplicates to one rank are counted."""
    return num_tokens * config.num_experts_per_tok * config.hidden_size * _BYTES_FP8


def combine_message_bytes(config: GlmDsaConfig, num_tokens: float) -> float:
    """BF16 expert outputs sent back to the tokens."""
    return num_tokens * config.num_experts_per_tok * config.hidden_size * _BYTES_BF16


def lm_head_gather_bytes(config: GlmDsaConfig, num_rows: float) -> float:
    """BF16 logits gathered over the ranks that split the vocabulary."""
    return num_rows * config.vocab_size * _BYTES_BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective of a forward pass.

    Attributes:
        layer_kind: Which layers run it, for the report.
        count: How often per forward pass.
        message_bytes: Payload of one call over all GPUs of the replica.
        sent_bytes_per_gpu: What one GPU sends in one call.
        group_size: GPUs that take part.
        crosses_nodes: Whether the group spans nodes.
    """

    name: str
    layer_kind: str
    count: int
    message_bytes: float
    sent_bytes_per_gpu: float
    group_size: int
    crosses_nodes: bool

    @property
    def total_message_bytes(self) -> float:
        """Payload of all calls of a forward pass."""
        return self.count * self.message_bytes

    @property
    def start_up_us(self) -> float:
        """Fixed time of all calls."""
        each = NETWORK_LATENCY_US if self.crosses_nodes else COLLECTIVE_LATENCY_US
        return self.count * each

    def transfer_us(self, gpu: Gpu, gpus_per_node: int) -> float:
        """Time on the links of all calls, nothing overlapped.

        A group inside a node sends everything over the fast link. Across nodes the share
        `1 - gpus_per_node / group_size` leaves over the network while the rest stays inside; the
        slower of both decides.
        """
        leaving = 0.0
        if self.crosses_nodes:
            leaving = self.sent_bytes_per_gpu * (1.0 - gpus_per_node / self.group_size)
        inside = self.sent_bytes_per_gpu - leaving
        seconds = max(leaving / gpu.network_bytes_per_s, inside / gpu.link_bytes_per_s)
        return self.count * 1e6 * seconds

    def time_us(self, gpu: Gpu, gpus_per_node: int) -> float:
        """Start-up and transfer time of all calls."""
        return self.start_up_us + self.transfer_us(gpu, gpus_per_node)


def forward_collectives(
    config: GlmDsaConfig,
    layout: ParallelLayout,
    *,
    num_tokens: float,
    num_logit_rows: float,
    num_dense_layers: int | None = None,
    num_moe_layers: int | None = None,
) -> list[Collective]:
    """Collectives of one forward pass of the target, or of the MTP layer.

    Placement follows SGLang 0.5.23's layer boundaries: tokens that attention-DP groups hold apart
    are gathered before an MLP that every rank computes and scattered after it; under an
    all-to-all the MoE layers dispatch instead and need no gather.

    Args:
        config: The model.
        layout: Its parallel sizes.
        num_tokens: Rows of the pass over the whole replica.
        num_logit_rows: Rows that reach the LM head.
        num_dense_layers: Layers with a dense MLP, by default the target's.
        num_moe_layers: Layers with experts, by default the target's.

    Returns:
        One entry per kind; empty on a single GPU.
    """
    dense = config.num_dense_layers if num_dense_layers is None else num_dense_layers
    moe = config.num_moe_layers if num_moe_layers is None else num_moe_layers
    build = _Builder(layout)
    hidden = hidden_message_bytes(config, num_tokens)
    per_group = hidden / layout.attn_dp_size
    a2a = layout.moe_dispatch == "all_to_all"
    # A dense MLP that each rank computes alone needs its own tokens only.
    split_dense = 0 if layout.dense_mlp_replicated else dense
    if layout.attn_dp_size == 1:
        build.all_reduce("all-reduce", "after attention", dense + (0 if a2a else moe), per_group)
        build.all_reduce("all-reduce", "after MLP", split_dense + (0 if a2a else moe), per_group)
        if a2a:
            # Reduce-scatter before the dispatch and all-gather after the combine move together
            # what one all-reduce moves.
            build.all_reduce("reduce-scatter + all-gather", "around MoE", moe, per_group)
    else:
        if layout.attn_tp_size > 1:
            build.all_reduce(
                "all-reduce (attention group)",
                "after attention",
                dense + moe,
                per_group,
                group_size=layout.attn_tp_size,
            )
        gathered = split_dense + (0 if a2a else moe)
        build.gather("all-gather", "before MLP", gathered, hidden)
        build.gather("reduce-scatter", "after MLP", gathered, hidden)
    if a2a:
        build.exchange("dispatch", moe, dispatch_message_bytes(config, num_tokens))
        build.exchange("combine", moe, combine_message_bytes(config, num_tokens))
    if layout.attn_dp_size > 1:
        # A head split over all ranks needs every group's rows first.
        group_size = layout.tp_size if layout.lm_head_tp_size > layout.attn_tp_size else 1
        rows = hidden_message_bytes(config, num_logit_rows)
        build.gather("rows all-gather", "LM head", 1, rows, group_size=group_size)
    build.gather(
        "logits all-gather",
        "LM head",
        1,
        lm_head_gather_bytes(config, num_logit_rows),
        group_size=layout.lm_head_tp_size,
    )
    return build.collectives


class _Builder:
    """Collects non-empty collectives of a layout."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout
        self.collectives: list[Collective] = []

    def all_reduce(
        self,
        name: str,
        layer_kind: str,
        count: int,
        message_bytes: float,
        *,
        group_size: int | None = None,
    ) -> None:
        # Ring: reduce-scatter and all-gather each send (n - 1) / n of the message.
        size = self._layout.tp_size if group_size is None else group_size
        self._add(name, layer_kind, count, message_bytes, 2 * message_bytes / size, size)

    def gather(
        self,
        name: str,
        layer_kind: str,
        count: int,
        message_bytes: float,
        *,
        group_size: int | None = None,
    ) -> None:
        size = self._layout.tp_size if group_size is None else group_size
        self._add(name, layer_kind, count, message_bytes, message_bytes / size, size)

    def exchange(self, name: str, count: int, message_bytes: float) -> None:
        size = self._layout.tp_size
        # A GPU holds 1 / n of the tokens, and sends 1 / n of them to each of the n destinations.
        self._add(name, "MoE", count, message_bytes, message_bytes / size**2, size)

    def _add(
        self,
        name: str,
        layer_kind: str,
        count: int,
        message_bytes: float,
        sent_to_each: float,
        group_size: int,
    ) -> None:
        if group_size == 1 or count == 0:
            return
        self.collectives.append(
            Collective(
                name=name,
                layer_kind=layer_kind,
                count=count,
                message_bytes=message_bytes,
                sent_bytes_per_gpu=sent_to_each * (group_size - 1),
                group_size=group_size,
                crosses_nodes=group_size > self._layout.gpus_per_node,
            )
        )
