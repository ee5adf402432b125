"""Whole lives of requests in a sharded cache against a plain model, in random order (T08, T33).

The model says which logical page belongs to whom. After every step each page is free or has one owner,
the pages of a chain stand with the ranks in turn, so that their counts differ by at most one, and
latents and index keys of a page are on the rank that owns it, as one pool of all pages holds them.
Every prefill reads its whole history through the gather.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from glm_kernels.cache.layout import PAGE_SIZE
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator

from tests.support.pools import index_rows, latent_rows, one_rank
from tests.support.sharded_pools import ShardedRanks

PAGES_A_RANK = 4
#: One shared layer between two full ones.
SHARED = (False, True, False)


class Chain:
    """A request's positions, or a cached prefix's: their slots, page after page.

    Attributes:
        base: Rank of the first page; the others follow in turn.
        borrowed: Pages at the start that belong to a cached prefix.
    """

    def __init__(self, prefix: Chain | None = None) -> None:
        self.slots: list[int] = list(prefix.slots) if prefix else []
        self.base = prefix.base if prefix else None
        self.prefix = prefix
        self.borrowed = len(self.slots) // PAGE_SIZE

    def pages(self) -> list[int]:
        return [slot // PAGE_SIZE for slot in self.slots[::PAGE_SIZE]]


class ShardedLife(RuleBasedStateMachine):
    """SGLang's allocator of sharded pages over our pools, driven as its scheduler drives it."""

    dtype = torch.float32
    world_size = 2
    #: Whether freed pages wait until they can be sorted, as in prefill/decode disaggregation.
    need_sort = False

    def __init__(self) -> None:
        super().__init__()
        self.exit = contextlib.ExitStack()
        self.exit.enter_context(one_rank())
        self.ranks = ShardedRanks(
            self.dtype,
            PAGES_A_RANK,
            self.world_size,
            prefix_pages=2 * (PAGES_A_RANK + 1) * self.world_size,
            new_pages=PAGES_A_RANK * self.world_size,
            shared=SHARED,
        )
        # Every rank runs one of its own; they must stay the same.
        self.allocators = [
            PageInterleavePoolAllocator(
                PAGES_A_RANK * PAGE_SIZE,
                physical_page_size=PAGE_SIZE,
                shard_size=self.world_size,
                dtype=self.dtype,
                device="cpu",
                kvcache=pool,
                need_sort=self.need_sort,
                shard_spec=pool.shard_spec,
            )
            for pool in self.ranks.pools
        ]
        self.running: list[Chain] = []
        self.cached: list[Chain] = []

    def teardown(self) -> None:
        self.exit.close()

    def grow(self, chains: list[Chain], counts: list[int]) -> bool:
        """Allocate new positions on every rank; refused only where a rank lacks pages."""
        old = torch.tensor([len(chain.slots) for chain in chains])
        new = old + torch.tensor(counts)
        free = self.allocators[0].class_free_page_counts()
        results, bases = [], []
        for allocator in self.allocators:
            bases.append([chain.base for chain in chains])
            results.append(
                allocator.alloc_extend(
                    prefix_lens=old,
                    prefix_lens_cpu=old,
                    seq_lens=new,
                    seq_lens_cpu=new,
                    last_loc=torch.tensor(
                        [chain.slots[-1] if chain.slots else -1 for chain in chains]
                    ),
                    extend_num_tokens=sum(counts),
                    rotation_bases=bases[-1],
                )
            )
        needed = int((-(-new // PAGE_SIZE) - old // PAGE_SIZE).sum())
        if results[0] is None:
            assert all(slots is None for slots in results)
            assert needed > min(free)
            return False
        assert all(torch.equal(slots, results[0]) for slots in results)
        assert all(base == bases[0] for base in bases)
        given = results[0].tolist()
        for chain, base, count in zip(chains, bases[0], counts, strict=True):
            chain.base = base
            chain.slots += given[:count]
            del given[:count]
        return True

    def prefill(self, chains: list[Chain], counts: list[int]) -> None:
        """One forward of a batch: the new rows are written, and all positions are read."""
        requests = [chain.slots for chain in chains]
        cached = [len(slots) - count for slots, count in zip(requests, counts, strict=True)]
        written = torch.tensor(
            [s for slots, n in zip(requests, cached, strict=True) for s in slots[n:]]
        )
        read = torch.tensor([slot for slots in requests for slot in slots])
        self.ranks.begin(requests, cached)
        whole = self.ranks.whole
        for layer in self.ranks.layers():
            self.ranks.write(layer, written)
            for pool in self.ranks.pools:
                latents, index_pages = pool.scratch(layer)
                places = pool.translate_loc_to_scratch(read)
                assert torch.equal(
                    latent_rows(latents, places), latent_rows(whole.kv_buffer[layer], read)
                )
                if not SHARED[layer]:
                    assert torch.equal(
                        index_rows(index_pages, places),
                        index_rows(whole.index_key_cache.buffer[layer], read),
                    )
        for pool in self.ranks.pools:
            pool.end_shard_extend()

    def free(self, chain: Chain, keep_pages: int) -> None:
        """Give back the pages behind the first ones."""
        slots = torch.tensor(chain.slots[keep_pages * PAGE_SIZE :], dtype=torch.int64)
        for allocator in self.allocators:
            allocator.free(slots)
        del chain.slots[keep_pages * PAGE_SIZE :]

    @rule(counts=st.lists(st.integers(1, 150), min_size=1, max_size=2), data=st.data())
    def start(self, counts: list[int], data: st.DataObject) -> None:
        """New prompts, which may begin as a cached one does."""
        chains = [Chain(data.draw(st.sampled_from([None, *self.cached]))) for _ in counts]
        if self.grow(chains, counts):
            self.prefill(chains, counts)
            self.running += chains

    @precondition(lambda self: self.unfinished())
    @rule(count=st.integers(1, 130), data=st.data())
    def next_chunk(self, count: int, data: st.DataObject) -> None:
        """A prompt in chunks, which end with a page."""
        chain = data.draw(st.sampled_from(self.unfinished()))
        if self.grow([chain], [count]):
            self.prefill([chain], [count])

    def unfinished(self) -> list[Chain]:
        return [chain for chain in self.running if len(chain.slots) % PAGE_SIZE == 0]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Whole pages that were not cached before become a cached prefix; the rest is free."""
        chain = data.draw(st.sampled_from(self.running))
        self.running.remove(chain)
        whole_pages = len(chain.slots) // PAGE_SIZE
        self.free(chain, whole_pages)
        if whole_pages > chain.borrowed:
            self.cached.append(chain)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Everything that a request does not share is free again."""
        chain = data.draw(st.sampled_from(self.running))
        self.running.remove(chain)
        self.free(chain, chain.borrowed)

    @precondition(lambda self: self.evictable())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A cached prefix that nobody reads is free again."""
        chain = data.draw(st.sampled_from(self.evictable()))
        self.cached.remove(chain)
        self.free(chain, chain.borrowed)

    def evictable(self) -> list[Chain]:
        in_use = {id(chain.prefix) for chain in self.running + self.cached}
        return [chain for chain in self.cached if id(chain) not in in_use]

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        owned = [page for c in self.running + self.cached for page in c.pages()[c.borrowed :]]
        first = self.world_size
        expected = list(range(first, first + PAGES_A_RANK * self.world_size))
        for allocator in self.allocators:
            assert sorted(allocator.get_all_free_pages().tolist() + owned) == expected

    @invariant()
    def ranks_take_turns(self) -> None:
        for chain in self.running + self.cached:
            owners = [page % self.world_size for page in chain.pages()]
            assert owners == [(chain.base + i) % self.world_size for i in range(len(owners))]
            counts = [owners.count(rank) for rank in range(self.world_size)]
            assert max(counts) - min(counts) <= 1

    @invariant()
    def both_halves_are_with_the_owner(self) -> None:
        whole = self.ranks.whole
        for chain in self.running + self.cached:
            slots = torch.tensor(chain.slots)
            for pool in self.ranks.pools:
                mine, rows = pool.shard.owned(slots)
                for layer in self.ranks.layers():
                    assert torch.equal(
                        latent_rows(pool.kv_buffer[layer], rows),
                        latent_rows(whole.kv_buffer[layer], slots[mine]),
                    )
                    if not SHARED[layer]:
                        assert torch.equal(
                            index_rows(pool.index_key_cache.buffer[layer], rows),
                            index_rows(whole.index_key_cache.buffer[layer], slots[mine]),
                        )


class Fp8Life(ShardedLife):
    dtype = torch.float8_e4m3fn


class ThreeRanksLife(ShardedLife):
    dtype = torch.bfloat16
    world_size = 3
    need_sort = True


LIVES = {"float32": ShardedLife, "fp8": Fp8Life, "bfloat16-3-sorted": ThreeRanksLife}


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("life", LIVES)
def test_lives(life: str, count: int) -> None:
    case = LIVES[life].TestCase
    case.settings = settings(
        max_examples=count,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # Shrinking re-runs a failing life for minutes; 25 steps can be read as they are.
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    case("runTest").runTest()
