"""Index keys of every full layer, beside the latent rows that they belong to."""

import math

import numpy as np
import torch
from glm_kernels.cache import layout
from glm_kernels.cache.index_pages import load_index_k, store_index_k
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_glm import envs
from sglang_glm.memory.checks import check_saved_rows, check_slots

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
        return self._as_keys(self.get_local_buffer(layer_id))

    @staticmethod
    def _as_keys(pages: torch.Tensor) -> torch.Tensor:
        return pages if pages.dtype == torch.uint8 else pages.view(-1, layout.INDEX_HEAD_DIM)

    def store(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor) -> None:
        """Write index keys to their slots.

        Args:
            layer_id: A full layer.
            slots: `[num_tokens]`, int32 or int64; negative slots are skipped.
            k: `[num_tokens, 128]` float; quantised here where the cache holds FP8 pages.

        Raises:
            RuntimeError: the layer is a shared one.
            ValueError: a slot is outside the cache, or `k` has another shape.
        """
        cache = self.keys(layer_id)
        if cache.shape[0] == 0:
            raise RuntimeError(
                f"index keys of layer {layer_id}: a shared layer has no index cache to write to"
            )
        self._write(f"index keys of layer {layer_id}", cache, slots, k)

    def _write(self, op: str, cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
        """Write keys to a cache in either form that `keys` returns."""
        check_slots(op, slots, self._num_slots(cache), padding=True)
        if k.shape != (len(slots), layout.INDEX_HEAD_DIM):
            raise ValueError(
                f"{op}: k is {list(k.shape)}, expected [{len(slots)}, {layout.INDEX_HEAD_DIM}]"
            )
        if cache.dtype == torch.uint8:
            store_index_k(cache, slots, k)
        else:
            written = slots >= 0
            cache[slots[written]] = k[written].to(cache.dtype)

    @staticmethod
    def _num_slots(keys: torch.Tensor) -> int:
        return keys.shape[0] * (layout.PAGE_SIZE if keys.dtype == torch.uint8 else 1)

    def load(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, 128]` fp32 keys of the given slots."""
        cache = self.keys(layer_id)
        check_slots(f"index keys of layer {layer_id}", slots, self._num_slots(cache))
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
        """A copy of the pages that hold `indices`, one tensor a layer.

        Args:
            indices: `[num_tokens]` slots, page after page in order.
        """
        pages = self._pages(indices)
        return [buffer[pages] if buffer.shape[0] else buffer[:0].clone() for buffer in self.buffer]

    def check_cpu_copy(self, index_k_cpu: list[torch.Tensor], indices: torch.Tensor) -> None:
        """Raise ValueError unless `load_cpu_copy` could write what was saved."""
        check_saved_rows(
            "restoring index pages", self.buffer, index_k_cpu, len(self._pages(indices))
        )

    def load_cpu_copy(self, index_k_cpu: list[torch.Tensor], indices: torch.Tensor) -> None:
        """Write pages that `cpu_copy` saved to the pages that hold `indices` now.

        Args:
            index_k_cpu: One tensor a layer, as `cpu_copy` returned it.
            indices: As many slots as were saved, page after page in order.

        Raises:
            ValueError: what was saved is of another format or length.
        """
        self.check_cpu_copy(index_k_cpu, indices)
        pages = self._pages(indices)
        for buffer, saved in zip(self.buffer, index_k_cpu, strict=True):
            if buffer.shape[0]:
                buffer[pages] = saved
