"""Brings the pages of a batch's prefix to every rank, one layer ahead of their use.

The scratch has two halves. While a layer reads one, the next layer's pages are gathered into the other
by a collective that runs beside the layer's work: `torch.distributed`, over gloo or NCCL alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_glm.parallel.page_shards import GatherPlan, PageShard


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when what it gathered may be read."""


class AllGather(Protocol):
    """Starts to bring `sent` of every rank into `gathered`, in order of ranks."""

    def __call__(self, gathered: torch.Tensor, sent: torch.Tensor) -> Work:
        """`gathered` is `[world_size * n, width]`, `sent` this rank's `[n, width]` of it."""


def all_gather_beside(group: dist.ProcessGroup) -> AllGather:
    """An all-gather over the ranks of `group`, on connections of its own.

    The group's own order of collectives is that of the layers; gathers that run beside them would
    have to be queued in it.
    """
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(own, dist.ProcessGroup), f"this rank is none of {ranks}"

    def all_gather(gathered: torch.Tensor, sent: torch.Tensor) -> Work:
        work = dist.all_gather_single(gathered, sent, group=own, async_op=True)
        assert work is not None, f"this rank is none of {ranks}"
        return work

    return all_gather


class PrefixGather:
    """Gathers layer after layer of one batch at a time.

    Every rank of the group must ask for every layer, also one that reads nothing of it.
    """

    def __init__(
        self,
        shard: PageShard,
        all_gather: AllGather,
        sources: Sequence[Sequence[torch.Tensor]],
        scratch: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        """Keep the buffers.

        Args:
            shard: This rank.
            all_gather: Starts a collective.
            sources: Of each layer, this rank's pages of each kind, `[num_pages, width]`; no pages
                where the layer has none of a kind.
            scratch: Both halves, `[scratch_pages, width]` of each kind.
        """
        self._shard = shard
        self._all_gather = all_gather
        self._sources = sources
        self._scratch = scratch
        self._plan: GatherPlan | None = None
        self._layer = -1
        self._under_way: list[Work] = []

    def begin(self, plan: GatherPlan) -> None:
        """Take up a batch's plan and start its first layer."""
        self._finish()
        self._plan, self._layer = plan, -1
        self._start(0)

    def half(self, layer: int) -> int:
        """The half of the scratch that holds `layer`; the next layer is under way on return.

        Args:
            layer: The last one that was asked for, or the one after it.

        Raises:
            RuntimeError: layers are asked for in another order.
        """
        if layer == self._layer:
            return layer % 2
        if layer != self._layer + 1:
            raise RuntimeError(
                f"layer {layer} was asked for after layer {self._layer}: a prefix is gathered layer by "
                "layer"
            )
        self._finish()
        self._layer = layer
        if layer + 1 < len(self._sources):
            # Its half was read by the layer before this one, whose work has been issued.
            self._start(layer + 1)
        return layer % 2

    def _start(self, layer: int) -> None:
        if self._plan is None or self._plan.block_pages == 0:
            return
        block = self._plan.block_pages
        first = self._shard.rank * block
        for pages, scratch in zip(self._sources[layer], self._scratch[layer % 2], strict=True):
            if pages.shape[0] == 0:
                continue
            sent = scratch[first : first + block]
            torch.index_select(pages, 0, self._plan.send_pages, out=sent)
            gathered = scratch[: self._shard.world_size * block]
            self._under_way.append(self._all_gather(gathered, sent))

    def _finish(self) -> None:
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
