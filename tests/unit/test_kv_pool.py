"""The CPU pool: bytes, moves, and that both halves stay together (known faults T08, T14, T30).

test_bytes_equal_plan      what is allocated is what the planner says a token costs
test_shared_layers         own no index pages, and refuse a write
test_round_trip            every form, shuffled slots across page edges
test_move                  latent and index key move as one thing
test_retraction            a request's copy survives the reuse of its pages
test_refused               a page size that the index pages do not have
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from glm_kernels.cache.layout import INDEX_PAGE_BYTES, MLA_ROW_BYTES
from glm_kernels.cache.mla_rows import pack_mla_rows, unpack_mla_rows
from sglang.srt.runtime_context import get_parallel

from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool, index_key_storage

SHARED = [False, False, True, True]
SIZE = 64 * 8
FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def make_pool(dtype: torch.dtype, page_size: int = 64) -> GlmDsaTokenToKVPool:
    return GlmDsaTokenToKVPool(
        SIZE,
        page_size=page_size,
        kv_lora_rank=512,
        dtype=dtype,
        qk_rope_head_dim=64,
        layer_num=len(SHARED),
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=MLA_ROW_BYTES if dtype == torch.float8_e4m3fn else 576,
        skip_topk_layers=SHARED,
        index_buf_size=SIZE,
    )


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Stand in for the groups that a server process builds."""
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        yield


@pytest.fixture(params=FORMS, ids=FORMS)
def pool(request: pytest.FixtureRequest) -> GlmDsaTokenToKVPool:
    return make_pool(FORMS[request.param])


def write(
    pool: GlmDsaTokenToKVPool, layer: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows and keys into `slots`; returns what they read back as."""
    latent, rope = torch.randn(len(slots), 1, 512), torch.randn(len(slots), 1, 64)
    key = torch.randn(len(slots), 128)
    pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), slots, latent, rope)
    if not SHARED[layer]:
        pool.index_key_cache.store(layer, slots, key)
    if pool.dsa_kv_cache_store_fp8:
        rows = unpack_mla_rows(pack_mla_rows(latent[:, 0], rope[:, 0]))
    else:
        rows = torch.cat([latent, rope], -1)[:, 0].to(pool.dtype).float()
    return rows, key


def test_bytes_equal_plan(pool: GlmDsaTokenToKVPool) -> None:
    slots = SIZE + 64
    row_bytes = MLA_ROW_BYTES if pool.dsa_kv_cache_store_fp8 else 576 * pool.dtype.itemsize
    storage = index_key_storage(pool.dtype)
    page_bytes = INDEX_PAGE_BYTES if storage == torch.uint8 else 64 * 128 * storage.itemsize
    expected = 4 * slots * row_bytes + 2 * (slots // 64) * page_bytes
    assert pool.get_kv_size_bytes() == expected


def test_shared_layers(pool: GlmDsaTokenToKVPool) -> None:
    assert [buffer.shape[0] > 0 for buffer in pool.index_key_cache.buffer] == [
        not s for s in SHARED
    ]
    with pytest.raises(RuntimeError, match="layer 2"):
        pool.index_key_cache.store(2, torch.tensor([64]), torch.randn(1, 128))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_round_trip(pool: GlmDsaTokenToKVPool, length: int) -> None:
    slots = 64 + torch.randperm(SIZE)[:length]
    for layer in range(4):
        rows, key = write(pool, layer, slots)
        assert torch.equal(pool.latent_rows(layer, slots), rows)
        nope, rope = pool.get_mla_kv_buffer(SimpleNamespace(layer_id=layer), slots, torch.float32)
        assert torch.equal(torch.cat([nope, rope], -1)[:, 0], rows)
        if not SHARED[layer]:
            loaded = pool.index_key_cache.load(layer, slots)
            bound = {torch.uint8: 0.07, torch.bfloat16: 0.01, torch.float32: 0.0}
            assert (
                (loaded - key).abs()
                <= bound[index_key_storage(pool.dtype)] * key.abs() + 1e-2 * (loaded != key)
            ).all()
    untouched = torch.ones(SIZE + 64, dtype=torch.bool)
    untouched[slots] = False
    assert not pool.kv_buffer[0][untouched].view(torch.uint8).any()


def test_move(pool: GlmDsaTokenToKVPool) -> None:
    source, target = 64 + torch.arange(0, 70), 64 + torch.arange(200, 270)
    write(pool, 0, source)
    rows, keys = pool.latent_rows(0, source), pool.index_key_cache.load(0, source)
    pool.move_kv_cache(target, source)
    assert torch.equal(pool.latent_rows(0, target), rows)
    assert torch.equal(pool.index_key_cache.load(0, target), keys)


def test_retraction(pool: GlmDsaTokenToKVPool) -> None:
    old = torch.cat([torch.arange(128, 192), torch.arange(64, 128)])
    for layer in (0, 1, 3):
        write(pool, layer, old)
    rows = [pool.latent_rows(layer, old) for layer in range(4)]
    keys = pool.index_key_cache.load(1, old)
    saved = pool.get_cpu_copy(old)
    for layer in range(4):
        write(pool, layer, old)  # another request has the pages now
    new = torch.arange(320, 448)
    pool.load_cpu_copy(saved, new)
    assert all(torch.equal(pool.latent_rows(layer, new), rows[layer]) for layer in range(4))
    assert torch.equal(pool.index_key_cache.load(1, new), keys)


def test_refused() -> None:
    with pytest.raises(ValueError, match="page_size is 32, expected a multiple of 64"):
        make_pool(torch.float32, page_size=32)
