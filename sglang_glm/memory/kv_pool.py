"""The paged cache of latents and index keys on the CPU, as SGLang's DSA pool.

Both halves share one page plan: page p holds positions whose latent rows are 64p..64p+63 and whose
index keys are page p of every full layer. Shared layers own no index storage.
"""

import math
from typing import Any

import numpy as np
import torch
from glm_kernels.cache import layout
from glm_kernels.cache.index_pages import load_index_k, store_index_k
from glm_kernels.cache.mla_rows import unpack_mla_rows
from glm_kernels.cache.store_mla_kv import store_mla_kv
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_parallel

from sglang_glm import envs
from sglang_glm.parallel.history_stripes import owned_rows

_FLOAT_INDEX_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def index_key_storage(kv_dtype: torch.dtype) -> torch.dtype:
    """Element type of the index cache: uint8 for FP8 pages, otherwise that of plain keys.

    Args:
        kv_dtype: dtype of the latent cache; "auto" keeps index keys as exact as the latents.
    """
    choice = envs.INDEX_KEY_DTYPE.get()
    if choice == "auto":
        choice = "float32" if kv_dtype == torch.float32 else "fp8"
    return _FLOAT_INDEX_DTYPES.get(choice, torch.uint8)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel hands out page by page, as rows are written.

    `torch.zeros` touches every byte at start: half a minute for 16 GB that may never be used.
    """
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


class GlmIndexKeyCache(IndexKeyCache):
    """Index keys of every full layer, in pages of 64.

    `buffer[layer]` is `[num_pages, 8448]` uint8 (see `glm_kernels.cache.layout`), or
    `[num_pages, 64 * 128]` in a float dtype that stores keys as they are. A shared layer's buffer
    has no pages.
    """

    def __init__(self, pool: DSATokenToKVPool, index_buf_size: int) -> None:
        self.pool = pool
        # One page more than the pool's: page 0 takes the writes of padded rows.
        num_pages = (index_buf_size + pool.page_size + 1) // layout.PAGE_SIZE
        self.buffer = [
            lazy_zeros(
                self._buffer_shape(self._layer_num_pages(layer, num_pages)),
                pool.index_k_with_scale_buffer_dtype,
            )
            for layer in range(pool.layer_num)
        ]

    def _buffer_shape(self, num_pages: int) -> tuple[int, int]:
        if self.pool.index_k_with_scale_buffer_dtype == torch.uint8:
            return num_pages, layout.INDEX_PAGE_BYTES
        return num_pages, layout.PAGE_SIZE * layout.INDEX_HEAD_DIM

    def keys(self, layer_id: int) -> torch.Tensor:
        """The layer's cache in the form that `glm_kernels.indexer` reads.

        Returns:
            `[num_pages, 8448]` uint8, or `[num_slots, 128]` float.
        """
        buffer = self.get_local_buffer(layer_id)
        return buffer if buffer.dtype == torch.uint8 else buffer.view(-1, layout.INDEX_HEAD_DIM)

    def store(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor) -> None:
        """Write index keys to their slots.

        Args:
            layer_id: A full layer.
            slots: `[num_tokens]` int64.
            k: `[num_tokens, 128]` float; quantised here where the cache holds FP8 pages.
        """
        cache = self.keys(layer_id)
        if cache.shape[0] == 0:
            raise RuntimeError(
                f"index keys of layer {layer_id}: a shared layer has no index cache to write to"
            )
        if cache.dtype == torch.uint8:
            store_index_k(cache, slots, k)
        else:
            cache[slots] = k.to(cache.dtype)

    def load(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, 128]` fp32 keys of the given slots."""
        cache = self.keys(layer_id)
        return load_index_k(cache, slots) if cache.dtype == torch.uint8 else cache[slots].float()

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy index keys from `src_loc` to `tgt_loc` in every full layer."""
        if self.pool.index_k_with_scale_buffer_dtype == torch.uint8:
            super().move(tgt_loc, src_loc)
            return
        for index_k in self.buffer:
            if index_k.shape[0]:
                keys = index_k.view(-1, layout.INDEX_HEAD_DIM)
                keys[tgt_loc.view(-1).long()] = keys[src_loc.view(-1).long()]

    def _pages(self, indices: torch.Tensor) -> torch.Tensor:
        return indices[:: layout.PAGE_SIZE] // layout.PAGE_SIZE

    def cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """A copy of the pages that hold `indices`, one tensor a layer."""
        pages = self._pages(indices)
        return [buffer[pages] if buffer.shape[0] else buffer[:0] for buffer in self.buffer]

    def load_cpu_copy(self, index_k_cpu: list[torch.Tensor], indices: torch.Tensor) -> None:
        """Write pages that `cpu_copy` saved to the pages that hold `indices` now."""
        pages = self._pages(indices)
        for buffer, saved in zip(self.buffer, index_k_cpu, strict=True):
            if buffer.shape[0]:
                buffer[pages] = saved


class GlmDsaTokenToKVPool(DSATokenToKVPool):
    """SGLang's DSA pool with torch in place of CUDA kernels.

    `kv_buffer[layer]` is `[size + 64, 1, 576]` in FP32 or BF16, or `[size + 64, 1, 656]` uint8 for
    packed rows. Slot 0 up to 63 is the page that padding writes to.
    """

    def __init__(self, size: int, page_size: int, *args: Any, **kwargs: Any) -> None:
        # A draft's pool under decode context parallelism has the pages of all ranks in one.
        if page_size % layout.PAGE_SIZE or page_size == 0:
            raise ValueError(
                f"page_size is {page_size}, expected a multiple of {layout.PAGE_SIZE}: index pages "
                "hold that many keys"
            )
        self.index_k_with_scale_buffer_dtype = index_key_storage(kwargs["dtype"])
        super().__init__(size, page_size, *args, **kwargs)

    def _create_buffers(self) -> None:
        shape = (self.size + self.page_size, 1, self.kv_cache_dim)
        self.kv_buffer = [lazy_zeros(shape, self.store_dtype) for _ in range(self.layer_num)]

    def _create_index_key_cache(self) -> GlmIndexKeyCache:
        return GlmIndexKeyCache(self, self.index_buf_size)

    def _write_mla_kv_buffer(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        latents, rotary = cache_k_nope.flatten(1), cache_k_rope.flatten(1)
        if self.stripes > 1:
            mine, loc = owned_rows(loc, get_parallel().attn_dcp_rank, self.stripes)
            latents, rotary = latents[mine], rotary[mine]
        store_mla_kv(dst_buffer, loc, latents, rotary)

    @property
    def stripes(self) -> int:
        """Ranks over which the latents of a history are spread; this pool holds one stripe."""
        return 1 if self.dcp_replicated else get_parallel().attn_dcp_size

    def _stripe_of_run(self, indices: torch.Tensor) -> torch.Tensor:
        """This rank's rows among a page-aligned run of slots."""
        return owned_rows(indices, get_parallel().attn_dcp_rank, self.stripes)[1]

    def latent_rows(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the given slots, dequantised.

        Args:
            layer_id: Any layer of this pool.
            slots: `[num_tokens]` int64.

        Returns:
            `[num_tokens, 576]` fp32.
        """
        rows = self.latent_cache(layer_id)[slots, 0]
        return unpack_mla_rows(rows) if self.dsa_kv_cache_store_fp8 else rows.float()

    def latent_cache(self, layer_id: int) -> torch.Tensor:
        """The layer's whole cache, `[num_slots, 1, 576 or 656]`, as stored."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return self.kv_buffer[layer_id - self.start_layer]

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents `[num_tokens, 1, 512]` and rotary parts `[num_tokens, 1, 64]` of the slots `loc`."""
        rows = self.latent_rows(layer.layer_id, unwrap_write_loc(loc)[0]).unsqueeze(1)
        rows = rows.to(dst_dtype or self.dtype)
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> dict[str, list[torch.Tensor]]:
        """Latent rows and index pages of `indices`, for a request that is retracted."""
        return {
            "kv": [buffer[self._stripe_of_run(indices)] for buffer in self.kv_buffer],
            "index_k": self.index_key_cache.cpu_copy(indices),
        }

    def load_cpu_copy(
        self,
        kv_cache_cpu_dict: dict[str, list[torch.Tensor]],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Put what `get_cpu_copy` saved into the slots `indices`."""
        for buffer, saved in zip(self.kv_buffer, kv_cache_cpu_dict["kv"], strict=True):
            buffer[self._stripe_of_run(indices)] = saved
        self.index_key_cache.load_cpu_copy(kv_cache_cpu_dict["index_k"], indices)
