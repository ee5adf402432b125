"""Ranks of a sharded cache in one process, driven layer by layer as their forwards are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from glm_kernels.cache.layout import INDEX_HEAD_DIM, PAGE_SIZE
from sglang.srt.mem_cache.page_interleave import PageShardSpec

from sglang_glm.memory.sharded_pool import GlmDsaShardedTokenToKVPool
from tests.support.pools import SHARED, make_pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool
    from sglang_glm.parallel.prefix_gather import AllGather


class LocalRanks:
    """An all-gather between objects of one process.

    A wait fails unless every rank has started the same collective, which is how two processes would
    hang.
    """

    def __init__(self, world_size: int) -> None:
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(world_size)]

    def member(self, rank: int) -> AllGather:
        def all_gather(gathered: torch.Tensor, sent: torch.Tensor) -> Started:
            self.sent[rank].append(sent.clone())
            return Started(self, len(self.sent[rank]) - 1, gathered)

        return all_gather


class Started:
    def __init__(self, ranks: LocalRanks, index: int, gathered: torch.Tensor) -> None:
        self.ranks, self.index, self.gathered = ranks, index, gathered

    def wait(self) -> None:
        blocks = [sent[self.index] for sent in self.ranks.sent]
        self.gathered.copy_(torch.cat(blocks))


class ShardedRanks:
    """The pools of a group, and one pool that holds everything and is written the same."""

    def __init__(
        self,
        dtype: torch.dtype,
        pages_a_rank: int,
        world_size: int,
        *,
        prefix_pages: int,
        new_pages: int,
        shared: Sequence[bool] = SHARED,
    ) -> None:
        self.dtype, self.world_size, self.shared = dtype, world_size, shared
        self.collectives = LocalRanks(world_size)
        self.specs = [
            PageShardSpec(
                shard_rank=rank,
                shard_size=world_size,
                page_size=PAGE_SIZE,
                max_prefix_tokens=prefix_pages * PAGE_SIZE,
                chunk_tokens=new_pages * PAGE_SIZE,
            )
            for rank in range(world_size)
        ]
        self.pools = [
            make_pool(
                dtype,
                pages_a_rank * PAGE_SIZE,
                pool_class=GlmDsaShardedTokenToKVPool,
                shared=shared,
                shard_spec=spec,
                shard_group=None,
                all_gather=self.collectives.member(spec.shard_rank),
            )
            for spec in self.specs
        ]
        # Its pages are the logical ones: the padding pages of all ranks, then theirs.
        self.whole: GlmDsaTokenToKVPool = make_pool(
            dtype, ((pages_a_rank + 1) * world_size - 1) * PAGE_SIZE, shared=shared
        )

    def begin(self, requests: Sequence[Sequence[int]], prefix_lens: Sequence[int]) -> None:
        """Start a batch on every rank: logical slots of each request, cached positions first."""
        table = torch.zeros(len(requests), max(map(len, requests)), dtype=torch.int32)
        for row, slots in zip(table, requests, strict=True):
            row[: len(slots)] = torch.tensor(slots)
        for pool in self.pools:
            # Whatever an earlier batch left there must not be read.
            for buffer in (*pool._latent_scratch, *pool._index_scratch):
                buffer.view(torch.uint8).fill_(0xFF)
            pool.begin_shard_extend(
                table, torch.arange(len(requests)), prefix_lens, [len(slots) for slots in requests]
            )

    def layers(self) -> Iterator[int]:
        """Every layer in turn; each rank asks for it before any asks for the next."""
        yield from range(len(self.shared))

    def write(self, layer: int, slots: torch.Tensor) -> None:
        """The same random rows and keys into every rank and into the whole pool."""
        count = len(slots)
        latent, rope = torch.randn(count, 1, 512), torch.randn(count, 1, 64)
        key = torch.randn(count, INDEX_HEAD_DIM)
        for pool in (*self.pools, self.whole):
            if not self.shared[layer]:
                pool.index_key_cache.store(layer, slots, key)
            pool.set_mla_kv_buffer(None, slots, latent, rope, layer_id_override=layer)
