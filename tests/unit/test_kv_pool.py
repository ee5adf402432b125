"""The CPU pool: bytes, moves, and that both halves stay together (T08, T14, T30).

test_bytes_equal_plan      what is allocated is what the planner says a token costs
test_shared_layers         own no index pages, and refuse a write
test_round_trip            every form, shuffled slots across page edges
test_move                  latent and index key move as one thing, byte for byte, over shuffled pages
test_overlapping_move      accepted drafts move down over rejected ones: all read before any is written
test_retraction            a request's copy survives the reuse of its pages
test_striped_retraction    the same for one rank's stripe of a history
test_padding_is_skipped    negative slots are written nowhere, in either half
test_beyond_2_31           rows and keys whose offsets need more than 32 bits
test_refused_*             sizes, formats, slots and copies that would corrupt the cache
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from glm_kernels.cache.layout import INDEX_PAGE_BYTES, MLA_ROW_BYTES
from glm_kernels.cache.mla_rows import pack_mla_rows, unpack_mla_rows
from sglang.srt.runtime_context import get_parallel

from sglang_glm.memory.index_key_cache import GlmIndexKeyCache
from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool, index_key_storage
from tests.support.pools import (
    FORMS,
    SHARED,
    index_bytes,
    latent_bytes,
    make_pool,
    one_rank,
    position_bytes,
    write_random,
)

SIZE = 64 * 8


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(params=FORMS, ids=FORMS)
def pool(request: pytest.FixtureRequest) -> GlmDsaTokenToKVPool:
    return make_pool(FORMS[request.param], SIZE)


def write(
    pool: GlmDsaTokenToKVPool, layer: int, slots: torch.Tensor, *, is_shared: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows and keys into `slots`; returns what they read back as."""
    latent, rope = torch.randn(len(slots), 1, 512), torch.randn(len(slots), 1, 64)
    key = torch.randn(len(slots), 128)
    pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), slots, latent, rope)
    if not (SHARED[layer] if is_shared is None else is_shared):
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


def shuffled_pages(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of two requests of `length` tokens whose pages are disjoint and in no order."""
    pages = 1 + torch.randperm(SIZE // 64)
    count = -(-length // 64)
    slots = (pages[:, None] * 64 + torch.arange(64)).flatten()
    return slots[:length], slots[count * 64 : count * 64 + length]


LENGTHS = [1, 63, 64, 65, 127, 128, 129]


@pytest.mark.parametrize("length", LENGTHS)
def test_move(pool: GlmDsaTokenToKVPool, length: int) -> None:
    source, target = shuffled_pages(length)
    write_random(pool, torch.arange(64, SIZE + 64))
    before = [position_bytes(pool, slot) for slot in range(SIZE + 64)]
    pool.move_kv_cache(target, source)
    moved = dict(zip(target.tolist(), source.tolist(), strict=True))
    for slot in range(SIZE + 64):
        assert position_bytes(pool, slot) == before[moved.get(slot, slot)], slot


def test_overlapping_move(pool: GlmDsaTokenToKVPool) -> None:
    write_random(pool, torch.arange(64, 256))
    before = [position_bytes(pool, slot) for slot in range(256)]
    # Slots 126 to 131 are drafts over a page's edge; the third, fourth and last were accepted.
    pool.move_kv_cache(torch.tensor([126, 127, 128]), torch.tensor([128, 129, 131]))
    after = [position_bytes(pool, slot) for slot in range(256)]
    assert after[126:129] == [before[128], before[129], before[131]]
    assert after[:126] == before[:126]
    assert after[129:] == before[129:]


@pytest.mark.parametrize("length", LENGTHS)
def test_retraction(pool: GlmDsaTokenToKVPool, length: int) -> None:
    old, new = shuffled_pages(length)
    write_random(pool, old)
    before = [position_bytes(pool, slot) for slot in old.tolist()]
    # The block table, from which SGLang takes them, is int32.
    saved = pool.get_cpu_copy(old.int())
    write_random(pool, torch.arange(64, SIZE + 64))  # other requests have every page now
    kept = {slot: position_bytes(pool, slot) for slot in range(64, SIZE + 64)}
    pool.load_cpu_copy(saved, new.int())
    assert [position_bytes(pool, slot) for slot in new.tolist()] == before
    untouched = set(range(64, SIZE + 64)) - set(
        (new // 64 * 64 + torch.arange(64)[:, None]).flatten().tolist()
    )
    assert all(position_bytes(pool, slot) == kept[slot] for slot in untouched)


def test_padding_is_skipped(pool: GlmDsaTokenToKVPool) -> None:
    slots = torch.tensor([-1, 70, -(2**31), 71])
    write_random(pool, slots)
    empty = position_bytes(make_pool(pool.dtype, SIZE), 0)
    written = [slot for slot in range(SIZE + 64) if position_bytes(pool, slot) != empty]
    assert written == [70, 71]


def test_beyond_2_31() -> None:
    # Lazily allocated: only the pages that are touched take memory.
    num_slots = 2**31 // MLA_ROW_BYTES // 64 * 64 + 64 * 4
    pool = make_pool(torch.float8_e4m3fn, num_slots, shared=(True,))
    last = torch.arange(num_slots + 64 - 70, num_slots + 64)
    assert int(last[0]) * MLA_ROW_BYTES > 2**31 - 70 * MLA_ROW_BYTES
    rows, _ = write(pool, 0, last.int(), is_shared=True)
    assert torch.equal(pool.latent_rows(0, last.int()), rows)
    pool.move_kv_cache(torch.arange(64, 134), last)
    assert torch.equal(pool.latent_rows(0, torch.arange(64, 134)), rows)

    num_pages = 2**31 // INDEX_PAGE_BYTES + 2
    geometry = SimpleNamespace(
        page_size=64,
        layer_num=1,
        start_layer=0,
        index_k_with_scale_buffer_dtype=torch.uint8,
        skip_topk_layers=[False],
        layer_transfer_counter=None,
        index_kpool=1,
        index_page_size=64,
        index_head_dim=128,
    )
    keys = GlmIndexKeyCache(geometry, (num_pages - 1) * 64)
    high = torch.arange(num_pages * 64 - 70, num_pages * 64)
    keys.store(0, high, torch.randn(70, 128))
    content = [index_bytes(keys.buffer[0], slot) for slot in high.tolist()]
    keys.move(torch.arange(64, 134), high)
    assert [index_bytes(keys.buffer[0], slot) for slot in range(64, 134)] == content


@pytest.mark.parametrize(
    ("size", "page_size", "message"),
    [
        (SIZE, 32, "page_size is 32, expected a multiple of 64"),
        (SIZE, 96, "page_size is 96, expected a multiple of 64"),
        (SIZE, 0, "page_size is 0, expected a multiple of 64"),
        (0, 64, "the pool has 0 tokens, expected whole pages of 64 and at least one"),
        (63, 64, "the pool has 63 tokens"),
        (100, 64, "the pool has 100 tokens"),
        (2**31, 64, "expected at most 2147483584"),
    ],
)
def test_refused_size(size: int, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(torch.float32, size, page_size=page_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "576 x float16, expected 576 x float32"),
        ({"dtype": torch.float8_e5m2, "kv_cache_dim": 656}, "656 x float8_e5m2"),
        ({"dtype": torch.float8_e4m3fn}, "576 x float8_e4m3fn"),
        ({"dtype": torch.bfloat16, "kv_cache_dim": 656}, "656 x bfloat16"),
        ({"kv_lora_rank": 256}, "256 latent and 64 rotary values, expected 512 and 64"),
    ],
)
def test_refused_format(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(torch.float32, SIZE, **changes)


@pytest.mark.parametrize("slot", [SIZE + 64, 2**31 - 1, 2**31, 2**40])
def test_refused_slot(pool: GlmDsaTokenToKVPool, slot: int) -> None:
    slots = torch.tensor([70, slot])
    with pytest.raises(ValueError, match=f"latent rows: slot {slot} is outside the cache"):
        write(pool, 0, slots)
    with pytest.raises(ValueError, match=f"index keys of layer 0: slot {slot} is outside"):
        pool.index_key_cache.store(0, slots, torch.randn(2, 128))
    for wrong in (slots, torch.tensor([70, -1])):
        with pytest.raises(ValueError, match="outside the cache"):
            pool.latent_rows(0, wrong)
        with pytest.raises(ValueError, match="outside the cache"):
            pool.index_key_cache.load(0, wrong)
        with pytest.raises(ValueError, match="outside the cache"):
            pool.move_kv_cache(torch.tensor([64, 65]), wrong)
        with pytest.raises(ValueError, match="outside the cache"):
            pool.move_kv_cache(wrong, torch.tensor([64, 65]))
        with pytest.raises(ValueError, match="outside the cache"):
            pool.get_cpu_copy(wrong)
    assert not any(buffer.view(torch.uint8).any() for buffer in pool.kv_buffer)
    assert not any(buffer.view(torch.uint8).any() for buffer in pool.index_key_cache.buffer)


@pytest.mark.parametrize(
    "slots",
    [
        torch.tensor([64, 65, 66]).float(),
        torch.tensor([True, False, True]),
        torch.tensor([64, 65, 66], dtype=torch.int16),
        torch.tensor([[64], [65], [66]]),
    ],
    ids=["float", "bool", "int16", "2d"],
)
def test_refused_slot_tensor(pool: GlmDsaTokenToKVPool, slots: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \[num_tokens\] int32 or int64"):
        pool.index_key_cache.store(0, slots, torch.randn(3, 128))
    with pytest.raises(ValueError, match=r"expected \[num_tokens\] int32 or int64"):
        write(pool, 0, slots)


def test_refused_move(pool: GlmDsaTokenToKVPool) -> None:
    with pytest.raises(ValueError, match="2 targets for 3 sources"):
        pool.move_kv_cache(torch.tensor([64, 65]), torch.tensor([70, 71, 72]))


@pytest.mark.parametrize(
    ("slots", "position"),
    [
        (torch.arange(65, 130), 0),
        (torch.cat([torch.arange(64, 127), torch.arange(128, 192)]), 63),
        (torch.arange(64, 128).flip(0), 0),
        (torch.cat([torch.arange(64, 128), torch.arange(200, 210)]), 64),
    ],
    ids=["off a page's start", "a short page", "backwards", "into a page"],
)
def test_refused_export(pool: GlmDsaTokenToKVPool, slots: torch.Tensor, position: int) -> None:
    message = f"position {position} is in slot .*, expected whole pages"
    with pytest.raises(ValueError, match=message):
        pool.get_cpu_copy(slots)
    saved = pool.get_cpu_copy(torch.arange(64, 64 + len(slots)))
    with pytest.raises(ValueError, match=message):
        pool.load_cpu_copy(saved, slots)


def test_refused_import(pool: GlmDsaTokenToKVPool) -> None:
    source = torch.arange(64, 194)
    write_random(pool, source)
    saved = pool.get_cpu_copy(source)
    target = torch.arange(256, 386)
    other = next(dtype for dtype in FORMS.values() if dtype != pool.dtype)
    wrong = {
        "another form": make_pool(other, SIZE).get_cpu_copy(source),
        "another depth": make_pool(pool.dtype, SIZE, shared=SHARED[:3]).get_cpu_copy(source),
        "another sharing": make_pool(
            pool.dtype, SIZE, shared=(False, True, True, True)
        ).get_cpu_copy(source),
        "fewer rows": pool.get_cpu_copy(source[:129]),
        "fewer pages": {**saved, "index_k": pool.get_cpu_copy(source[:128])["index_k"]},
    }
    before = [position_bytes(pool, slot) for slot in range(SIZE + 64)]
    for name, copy in wrong.items():
        with pytest.raises(ValueError, match=r"layers were saved|was saved as"):
            pool.load_cpu_copy(copy, target)
        assert [position_bytes(pool, slot) for slot in range(SIZE + 64)] == before, name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_striped_retraction(form: str, rank: int) -> None:
    """A rank of two saves its half of the latents and all index keys, and finds both again."""
    old = torch.cat([torch.arange(640, 704), torch.arange(128, 192), torch.arange(1024, 1034)])
    new = torch.cat([torch.arange(256, 320), torch.arange(832, 896), torch.arange(512, 522)])
    with get_parallel().override(attn_dcp_size=2, attn_dcp_rank=rank):
        pool = make_pool(FORMS[form], SIZE, index_buf_size=2 * SIZE + 64)

        def content(slots: torch.Tensor) -> list[bytes]:
            stored = [slot // 2 for slot in slots.tolist() if slot % 2 == rank]
            latents = [latent_bytes(b, row) for b in pool.kv_buffer for row in stored]
            full = [buffer for buffer in pool.index_key_cache.buffer if buffer.shape[0]]
            return latents + [index_bytes(b, slot) for b in full for slot in slots.tolist()]

        write_random(pool, old)
        before = content(old)
        saved = pool.get_cpu_copy(old.int())
        write_random(pool, torch.arange(64, 2 * SIZE + 128))
        pool.load_cpu_copy(saved, new.int())
        assert content(new) == before
        with pytest.raises(ValueError, match=f"expected 0 to {2 * SIZE + 127}"):
            write_random(pool, torch.tensor([2 * SIZE + 128]))
