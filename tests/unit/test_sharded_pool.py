"""Ranks that share one cache page by page, against a pool that holds it all: byte for byte (T08, T12).

test_reads_as_whole      a batch over shuffled pages reads every position of every layer as one pool
                         does, cached pages and new ones, latents and index keys
test_chunks              a prompt in chunks: the next one reads what the ranks persisted of the last
test_stores_its_share    each rank allocates its pages alone and writes no others; together they hold
                         every byte of the whole cache
test_one_layer_ahead     the next layer's gather has been started when a layer is read, not earlier
test_every_rank_asks     a rank that reads nothing of a layer starts the next one all the same
test_padding             padded rows and negative slots reach no page
test_order               layers out of order, or outside of a prefill, are refused
test_refused_*           what would corrupt the cache, or move one rank's part of it alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.pools import FORMS, index_rows, latent_rows, one_rank
from tests.support.sharded_pools import ShardedRanks

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = 10


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(params=[2, 3])
def world_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=FORMS, ids=FORMS)
def ranks(request: pytest.FixtureRequest, world_size: int) -> ShardedRanks:
    return ShardedRanks(
        FORMS[request.param],
        PAGES,
        world_size,
        # Shuffled pages may all be one rank's: every block is then as long as the prefix.
        prefix_pages=4 * world_size,
        new_pages=4,
    )


def positions(pages: list[int], length: int) -> list[int]:
    """Slots of a request whose positions stand in `pages`, in order."""
    return [64 * pages[i // 64] + i % 64 for i in range(length)]


def usable(world_size: int) -> list[int]:
    """Every page but the padding pages, shuffled."""
    return (world_size + torch.randperm(PAGES * world_size)).tolist()


def check_layer(ranks: ShardedRanks, layer: int, requests: list[list[int]]) -> None:
    """Every rank reads every position as the whole pool has it."""
    slots = torch.tensor([slot for request in requests for slot in request])
    for pool in ranks.pools:
        latents, index_pages = pool.scratch(layer)
        places = pool.translate_loc_to_scratch(slots)
        expected = latent_rows(ranks.whole.kv_buffer[layer], slots)
        assert torch.equal(latent_rows(latents, places), expected), layer
        if not ranks.shared[layer]:
            expected = index_rows(ranks.whole.index_key_cache.buffer[layer], slots)
            assert torch.equal(index_rows(index_pages, places), expected), layer


def prefill(ranks: ShardedRanks, requests: list[list[int]], prefix_lens: list[int]) -> None:
    """One forward: new rows are written layer by layer, and each layer is read back."""
    new = [s for slots, n in zip(requests, prefix_lens, strict=True) for s in slots[n:]]
    ranks.begin(requests, prefix_lens)
    for layer in ranks.layers():
        ranks.write(layer, torch.tensor(new))
        check_layer(ranks, layer, requests)
    for pool in ranks.pools:
        pool.end_shard_extend()


@pytest.mark.parametrize("cached", [1, 2, 4])
def test_reads_as_whole(ranks: ShardedRanks, cached: int) -> None:
    pages = usable(ranks.world_size)
    first, second, third = pages[:cached], pages[cached], pages[cached + 1]
    prefill(ranks, [positions(first, 64 * cached)], [0])
    prefill(
        ranks,
        [positions([*first, second], 64 * cached + 7), positions([first[0], third], 65)],
        [64 * cached, 64],
    )


def test_chunks(ranks: ShardedRanks) -> None:
    pages = usable(ranks.world_size)[:3]
    for start, end in ((0, 64), (64, 128), (128, 150)):
        prefill(ranks, [positions(pages, end)], [start])


def test_stores_its_share(ranks: ShardedRanks) -> None:
    pages = usable(ranks.world_size)
    for page in pages:
        prefill(ranks, [positions([page], 64)], [0])
    n = ranks.world_size
    own_bytes = {pool.get_kv_size_bytes() for pool in ranks.pools}
    assert own_bytes == {ranks.whole.get_kv_size_bytes() // n}
    for pool in ranks.pools:
        rows = torch.arange(64, 64 * (PAGES + 1))
        slots = (rows // 64 * n + pool.shard.rank) * 64 + rows % 64
        for layer, is_shared in enumerate(ranks.shared):
            expected = latent_rows(ranks.whole.kv_buffer[layer], slots)
            assert torch.equal(latent_rows(pool.kv_buffer[layer], rows), expected)
            if not is_shared:
                expected = index_rows(ranks.whole.index_key_cache.buffer[layer], slots)
                own = pool.index_key_cache.buffer[layer]
                assert torch.equal(index_rows(own, rows), expected)
    for pool in ranks.pools:
        for buffer in (*pool.kv_buffer, *pool.index_key_cache.buffer):
            assert not buffer[: 64 if buffer.dim() == 3 else 1].any(), (
                "the padding page was written"
            )


def test_one_layer_ahead(ranks: ShardedRanks) -> None:
    pages = usable(ranks.world_size)[:2]
    prefill(ranks, [positions(pages, 128)], [0])
    kinds = [1 if is_shared else 2 for is_shared in ranks.shared]
    ranks.begin([[*positions(pages, 128), 64 * usable(ranks.world_size)[0]]], [128])
    started = sum(kinds[:1])
    assert [len(sent) for sent in ranks.collectives.sent] == [started] * ranks.world_size
    for layer in ranks.layers():
        for pool in ranks.pools:
            pool.scratch(layer)
        started = sum(kinds[: layer + 2])
        assert [len(sent) for sent in ranks.collectives.sent] == [started] * ranks.world_size


def test_every_rank_asks(ranks: ShardedRanks) -> None:
    pages = usable(ranks.world_size)[:2]
    prefill(ranks, [positions(pages[:1], 64)], [0])
    ranks.begin([positions(pages, 65)], [64])
    slots = torch.tensor([64 * pages[1]])
    for layer in ranks.layers():
        ranks.write(layer, slots)  # no rank reads
    assert len({len(sent) for sent in ranks.collectives.sent}) == 1


def test_padding(ranks: ShardedRanks) -> None:
    page = usable(ranks.world_size)[0]
    ranks.begin([[64 * page]], [0])
    before = [[buffer.clone() for buffer in pool.kv_buffer] for pool in ranks.pools]
    for layer in ranks.layers():
        ranks.write(layer, torch.tensor([-1, -64, 0]))
    for pool, saved in zip(ranks.pools, before, strict=True):
        for buffer, old in zip(pool.kv_buffer, saved, strict=True):
            assert torch.equal(buffer[64:], old[64:])


def test_order(ranks: ShardedRanks) -> None:
    pool = ranks.pools[0]
    with pytest.raises(RuntimeError, match="for prefill alone"):
        pool.latent_cache(0)
    with pytest.raises(RuntimeError, match="for prefill alone"):
        pool.index_key_cache.keys(0)
    ranks.begin([[64 * ranks.world_size]], [0])
    pool.scratch(0)
    with pytest.raises(RuntimeError, match="layer 2 was asked for after layer 0"):
        pool.scratch(2)


def test_refused_prefix(ranks: ShardedRanks) -> None:
    pages = usable(ranks.world_size)[:2]
    with pytest.raises(ValueError, match="70 cached positions"):
        ranks.begin([positions(pages, 100)], [70])


def test_refused_slots(ranks: ShardedRanks) -> None:
    ranks.begin([[64 * ranks.world_size]], [0])
    beyond = 64 * (PAGES + 1) * ranks.world_size
    pool = ranks.pools[0]
    with pytest.raises(ValueError, match=f"slot {beyond} is outside"):
        pool.set_mla_kv_buffer(
            None,
            torch.tensor([beyond]),
            torch.zeros(1, 1, 512),
            torch.zeros(1, 1, 64),
            layer_id_override=0,
        )
    with pytest.raises(ValueError, match=f"slot {beyond} is outside"):
        pool.index_key_cache.store(0, torch.tensor([beyond]), torch.zeros(1, 128))


def test_refused_export(ranks: ShardedRanks) -> None:
    slots, pool = torch.tensor([64]), ranks.pools[0]
    for export in (
        lambda: pool.move_kv_cache(slots, slots),
        lambda: pool.get_cpu_copy(slots),
        lambda: pool.load_cpu_copy({}, slots),
    ):
        with pytest.raises(NotImplementedError, match="only its own pages"):
            export()


def test_refused_scratch(world_size: int) -> None:
    with pytest.raises(ValueError, match="whole pages of all"):
        ShardedRanks(torch.float32, PAGES, world_size, prefix_pages=2 * world_size - 1, new_pages=1)
