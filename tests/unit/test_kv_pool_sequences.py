"""Whole lives of requests in the pool against a plain model, in random order (T08, T33).

The model is a dictionary: which bytes each position of each request must have. After every step each
page is free or has one owner, and every position that is owned reads as it was written: latent rows
and index keys of all layers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from glm_kernels.cache.layout import PAGE_SIZE
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from tests.support.pools import make_pool, one_rank, position_bytes, write_random

if TYPE_CHECKING:
    from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool

NUM_PAGES = 8
#: One shared layer between two full ones; an MTP layer's pool is a full layer alone.
SHARED = (False, True, False)


class Owned:
    """Positions that one owner holds: their slots, and what each must read as."""

    def __init__(self, prefix: Owned | None = None) -> None:
        self.slots: list[int] = list(prefix.slots) if prefix else []
        self.content: list[bytes] = list(prefix.content) if prefix else []
        #: Tokens at the start whose pages belong to a cached prefix.
        self.borrowed = len(self.slots)
        self.prefix = prefix

    def pages(self) -> set[int]:
        return {slot // PAGE_SIZE for slot in self.slots[self.borrowed :]}


class PoolLife(RuleBasedStateMachine):
    """SGLang's allocator over our pool, driven as its scheduler drives it."""

    dtype = torch.float32
    #: Whether freed pages wait until they can be sorted, as in prefill/decode disaggregation.
    need_sort = False

    def __init__(self) -> None:
        super().__init__()
        self.exit = contextlib.ExitStack()
        self.exit.enter_context(one_rank())
        self.pool: GlmDsaTokenToKVPool = make_pool(self.dtype, NUM_PAGES * PAGE_SIZE, shared=SHARED)
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_PAGES * PAGE_SIZE, PAGE_SIZE, self.dtype, "cpu", self.pool, self.need_sort
        )
        self.running: list[Owned] = []
        self.cached: list[Owned] = []
        self.retracted: list[tuple[list[bytes], dict]] = []

    def teardown(self) -> None:
        self.exit.close()

    def free_pages(self) -> int:
        return self.allocator.available_size() // PAGE_SIZE

    def grow(self, owned: Owned, count: int) -> bool:
        """Allocate `count` positions; refused exactly when the pages do not suffice."""
        old, new = len(owned.slots), len(owned.slots) + count
        needed = -(-new // PAGE_SIZE) - -(-old // PAGE_SIZE)
        before = self.free_pages()
        slots = self.allocator.alloc_extend(
            prefix_lens=torch.tensor([old]),
            prefix_lens_cpu=torch.tensor([old]),
            seq_lens=torch.tensor([new]),
            seq_lens_cpu=torch.tensor([new]),
            last_loc=torch.tensor([owned.slots[-1] if old else -1]),
            extend_num_tokens=count,
        )
        assert (slots is None) == (needed > before)
        if slots is None:
            return False
        assert self.free_pages() == before - needed
        owned.slots += slots.tolist()
        return True

    def write(self, owned: Owned) -> None:
        """Write every position that has a slot but no content yet."""
        new = owned.slots[len(owned.content) :]
        write_random(self.pool, torch.tensor(new))
        owned.content += [position_bytes(self.pool, slot) for slot in new]

    def shrink(self, owned: Owned, length: int) -> None:
        """Give back the pages beyond the first `length` positions."""
        first = -(-length // PAGE_SIZE) * PAGE_SIZE
        self.allocator.free(torch.tensor(owned.slots[first:], dtype=torch.int64))
        del owned.slots[length:], owned.content[length:]

    @rule(count=st.integers(1, 200), data=st.data())
    def start(self, count: int, data: st.DataObject) -> None:
        """A prompt, whose beginning may be cached: whole pages of it are shared."""
        prefix = data.draw(st.sampled_from([None, *self.cached]))
        owned = Owned(prefix)
        if self.grow(owned, count):
            self.write(owned)
            self.running.append(owned)

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 130), data=st.data())
    def prefill_on(self, count: int, data: st.DataObject) -> None:
        """The next chunk of a prompt."""
        owned = data.draw(st.sampled_from(self.running))
        if self.grow(owned, count):
            self.write(owned)

    @precondition(lambda self: self.running)
    @rule()
    def decode(self) -> None:
        """One token for every running request, in one allocation."""
        lengths = torch.tensor([len(owned.slots) + 1 for owned in self.running])
        slots = self.allocator.alloc_decode(
            lengths, lengths, torch.tensor([owned.slots[-1] for owned in self.running])
        )
        needed = sum(len(owned.slots) % PAGE_SIZE == 0 for owned in self.running)
        if slots is None:
            assert needed > self.free_pages()
            return
        for owned, slot in zip(self.running, slots.tolist(), strict=True):
            owned.slots.append(slot)
            self.write(owned)

    @precondition(lambda self: self.running)
    @rule(accepted=st.sets(st.integers(0, 5)), data=st.data())
    def draft_round(self, accepted: set[int], data: st.DataObject) -> None:
        """Six drafts are written, the accepted ones move to the front, the rest is given back."""
        owned = data.draw(st.sampled_from(self.running))
        verified = len(owned.slots)
        if not self.grow(owned, 6):
            return
        self.write(owned)
        chosen = [verified + draft for draft in sorted(accepted)]
        target = owned.slots[verified : verified + len(chosen)]
        self.pool.move_kv_cache(
            torch.tensor(target, dtype=torch.int64),
            torch.tensor([owned.slots[i] for i in chosen], dtype=torch.int64),
        )
        owned.content[verified:] = [owned.content[i] for i in chosen]
        self.shrink(owned, verified + len(chosen))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Whole pages that were not cached before become a cached prefix; the rest is free."""
        owned = data.draw(st.sampled_from(self.running))
        self.running.remove(owned)
        self.shrink(owned, len(owned.slots) // PAGE_SIZE * PAGE_SIZE)
        if len(owned.slots) > owned.borrowed:
            self.cached.append(owned)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Everything that a request does not share is free again."""
        owned = data.draw(st.sampled_from(self.running))
        self.running.remove(owned)
        self.shrink(owned, owned.borrowed)

    @precondition(lambda self: self.evictable())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A cached prefix that nobody reads is free again."""
        prefix = data.draw(st.sampled_from(self.evictable()))
        self.cached.remove(prefix)
        self.shrink(prefix, prefix.borrowed)

    def evictable(self) -> list[Owned]:
        in_use = {id(owned.prefix) for owned in self.running + self.cached}
        return [prefix for prefix in self.cached if id(prefix) not in in_use]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """A request leaves for main memory, the part that it shared included."""
        owned = data.draw(st.sampled_from(self.running))
        self.running.remove(owned)
        saved = self.pool.get_cpu_copy(torch.tensor(owned.slots, dtype=torch.int32))
        self.retracted.append((list(owned.content), saved))
        self.shrink(owned, owned.borrowed)

    @precondition(lambda self: self.retracted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """It comes back to pages of its own."""
        entry = data.draw(st.sampled_from(self.retracted))
        owned, (content, saved) = Owned(), entry
        if not self.grow(owned, len(saved["kv"][0])):
            return
        self.retracted = [other for other in self.retracted if other is not entry]
        self.pool.load_cpu_copy(saved, torch.tensor(owned.slots, dtype=torch.int32))
        owned.content = [position_bytes(self.pool, slot) for slot in owned.slots]
        assert owned.content == content
        self.running.append(owned)

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        free = self.allocator.get_all_free_pages().tolist()
        owned = [page for owner in self.running + self.cached for page in owner.pages()]
        assert sorted(free + owned) == list(range(1, NUM_PAGES + 1))

    @invariant()
    def every_position_reads_as_written(self) -> None:
        for owner in self.running + self.cached:
            for position, slot in enumerate(owner.slots):
                assert position_bytes(self.pool, slot) == owner.content[position], position


class Fp8Life(PoolLife):
    dtype = torch.float8_e4m3fn


class SortedLife(PoolLife):
    dtype = torch.bfloat16
    need_sort = True


LIVES = {"float32": PoolLife, "fp8": Fp8Life, "bfloat16-sorted": SortedLife}


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
