"""CPU pools without a server, and their bytes as docs/kv-layout.md places them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from glm_kernels.cache.layout import (
    INDEX_HEAD_DIM,
    INDEX_PAGE_BYTES,
    INDEX_SCALE_OFFSET,
    MLA_ROW_BYTES,
    PAGE_SIZE,
)
from sglang.srt.runtime_context import get_parallel

from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

#: Layers of the pools here: True for one that shares an earlier layer's selection.
SHARED = (False, False, True, True)


@contextmanager
def one_rank() -> Iterator[None]:
    """Stand in for the groups that a server process builds."""
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        yield


def make_pool(
    dtype: torch.dtype,
    size: int,
    /,
    *,
    page_size: int = PAGE_SIZE,
    shared: Sequence[bool] = SHARED,
    pool_class: type[GlmDsaTokenToKVPool] = GlmDsaTokenToKVPool,
    **changes: object,
) -> GlmDsaTokenToKVPool:
    """A pool as SGLang's configurator builds it; `changes` replace its arguments."""
    arguments = {
        "kv_lora_rank": 512,
        "dtype": dtype,
        "qk_rope_head_dim": 64,
        "layer_num": len(shared),
        "device": "cpu",
        "index_head_dim": INDEX_HEAD_DIM,
        "enable_memory_saver": False,
        "kv_cache_dim": MLA_ROW_BYTES if dtype == torch.float8_e4m3fn else 576,
        "skip_topk_layers": list(shared),
        "index_buf_size": size,
        **changes,
    }
    return pool_class(size, page_size=page_size, **arguments)


def write_random(pool: GlmDsaTokenToKVPool, slots: torch.Tensor) -> None:
    """Write random latents to every layer, and random index keys to every full one."""
    count = len(slots)
    for layer, is_shared in enumerate(pool.skip_topk_layers):
        latent, rope = torch.randn(count, 1, 512), torch.randn(count, 1, 64)
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), slots, latent, rope)
        if not is_shared:
            pool.index_key_cache.store(layer, slots, torch.randn(count, INDEX_HEAD_DIM))


def latent_bytes(buffer: torch.Tensor, slot: int) -> bytes:
    """One position's row of a layer, `[num_slots, 1, dim]`."""
    return buffer[slot].contiguous().view(torch.uint8).numpy().tobytes()


def index_bytes(buffer: torch.Tensor, slot: int) -> bytes:
    """One position's key of a full layer, with its scale where the pages are FP8."""
    page, row = divmod(slot, PAGE_SIZE)
    content = buffer[page].contiguous().view(torch.uint8)
    if len(content) != INDEX_PAGE_BYTES:
        width = len(content) // PAGE_SIZE
        return content[row * width : (row + 1) * width].numpy().tobytes()
    key = content[row * INDEX_HEAD_DIM : (row + 1) * INDEX_HEAD_DIM]
    scale = content[INDEX_SCALE_OFFSET + 4 * row : INDEX_SCALE_OFFSET + 4 * row + 4]
    return key.numpy().tobytes() + scale.numpy().tobytes()


def latent_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, row_bytes]` uint8: `latent_bytes` of many slots."""
    return buffer[slots, 0].view(torch.uint8)


def index_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, key_bytes]` uint8: `index_bytes` of many slots."""
    content = buffer.view(torch.uint8)
    if content.shape[1] != INDEX_PAGE_BYTES:
        return content.view(-1, content.shape[1] // PAGE_SIZE)[slots]
    keys = content[:, :INDEX_SCALE_OFFSET].reshape(-1, INDEX_HEAD_DIM)
    scales = content[:, INDEX_SCALE_OFFSET:].reshape(-1, 4)
    return torch.cat([keys[slots], scales[slots]], dim=1)


def position_bytes(pool: GlmDsaTokenToKVPool, slot: int) -> bytes:
    """Everything that the pool holds of one position, layer after layer."""
    latents = [latent_bytes(buffer, slot) for buffer in pool.kv_buffer]
    keys = [index_bytes(buffer, slot) for buffer in pool.index_key_cache.buffer if buffer.shape[0]]
    return b"".join(latents + keys)
