"""The host tier's pools without a server: what goes out comes back, byte for byte (T08).

test_round_trip       every form and layout: latents, index pages and the MTP layer's, to other pages
test_index_bytes      the host keeps as many bytes of an index page as the device has
test_rows_of_two      a copy whose rows differ in width is an error, not a partial copy
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.mem_cache.pool_host import common, dsa, mla
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_glm.compat.host import pool_host
from tests.support.pools import FORMS, SHARED, make_pool, one_rank, position_bytes, write_random

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool

SIZE = 64 * 8


@pytest.fixture(autouse=True)
def _host_platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the ledger does in a server's processes, undone afterwards."""
    for module in (mla, dsa):
        for transfer in pool_host._TRANSFERS:
            monkeypatch.setattr(module, transfer.__name__, None, raising=False)
    monkeypatch.setitem(common.ALLOC_MEMORY_FUNCS, "cpu", None)
    pool_host.supply_transfers()
    pool_host.use_pageable_memory()
    assert pool_host.check_transfers() is None
    assert pool_host.check_pageable_memory() is None
    with one_rank():
        yield


def host_pools(
    target: GlmDsaTokenToKVPool, draft: GlmDsaTokenToKVPool, layout: str
) -> tuple[MLATokenToKVPoolHost, DSAIndexerPoolHost]:
    """Host pools as SGLang assembles them for a target and an MTP layer packed behind it."""
    latents = MLATokenToKVPoolHost(
        target.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        target.page_size,
        layout,
        override_kv_cache_dim=target.kv_cache_dim,
        draft_buffer_infos=(draft.get_device_pool_infos()[0].buffer_info,),
        device_capacity_tokens=target.size,
        start_layer=target.start_layer,
        end_layer=target.end_layer,
        target_layer_num=target.layer_num,
    )
    decl = pool_host.index_pool_decl(make_dsa_indexer_pool_decl(target), target)
    return latents, DSAIndexerPoolHost(decl, latents, packed_draft_device_pools=(draft,))


def slots_of(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * 64 + torch.arange(64)).flatten()


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(form: str, layout: str) -> None:
    target = make_pool(FORMS[form], SIZE)
    draft = make_pool(FORMS[form], SIZE, shared=(False,))
    everything = torch.arange(SIZE + 64)
    for pool in (target, draft):
        write_random(pool, everything)
    before = {
        pool: [position_bytes(pool, slot) for slot in everything.tolist()]
        for pool in (target, draft)
    }

    hosts = host_pools(target, draft, layout)
    out, back, host = slots_of([5, 2, 7]), slots_of([1, 8, 3]), slots_of([9, 4, 11])
    for pool in hosts:
        pool.backup_from_device_all_layer(target, host, out, "direct")
    for pool in (target, draft):
        write_random(pool, out)
    other = {
        pool: [position_bytes(pool, slot) for slot in everything.tolist()]
        for pool in (target, draft)
    }

    for pool in hosts:
        for layer in range(len(SHARED)):
            pool.load_to_device_per_layer(target, host, back, layer, "direct")
        # The controller counts the MTP layer after the target's.
        pool.load_to_device_per_layer(draft, host, back, len(SHARED), "direct", is_draft=True)
    moved = dict(zip(back.tolist(), out.tolist(), strict=True))
    for pool in (target, draft):
        for slot in everything.tolist():
            want = before[pool][moved[slot]] if slot in moved else other[pool][slot]
            assert position_bytes(pool, slot) == want, slot


@pytest.mark.parametrize("form", FORMS)
def test_index_bytes(form: str) -> None:
    pool = make_pool(FORMS[form], SIZE)
    decl = pool_host.index_pool_decl(make_dsa_indexer_pool_decl(pool), pool)
    page = pool.index_key_cache.buffer[0][0]
    assert decl.storage_info.page_bytes(64) == page.nbytes
    assert decl.owned_device_layers == (0, 1)


def test_rows_of_two() -> None:
    wide, narrow = torch.zeros(8, 1, 576), torch.zeros(8, 1, 512)
    rows = torch.arange(3)
    with pytest.raises(RuntimeError):
        pool_host.transfer_kv_direct(
            src_layers=[wide], dst_layers=[narrow], src_indices=rows, dst_indices=rows, page_size=1
        )
    assert not narrow.any()
