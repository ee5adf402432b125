"""The paged cache of latents and index keys on the CPU, as SGLang's DSA pool.

Both halves share one page plan: page p holds positions whose latent rows are 64p..64p+63 and whose
index keys are page p of every full layer. Shared layers own no index storage.
"""

from typing import Any

import torch
from glm_kernels.cache.mla_rows import unpack_mla_rows
from glm_kernels.cache.store_mla_kv import store_mla_kv
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_parallel

from sglang_glm.memory.checks import (
    check_page_runs,
    check_pool_size,
    check_row_format,
    check_saved_rows,
    check_slots,
)
from sglang_glm.memory.index_key_cache import GlmIndexKeyCache, index_key_storage, lazy_zeros
from sglang_glm.parallel.history_stripes import owned_rows


class GlmDsaTokenToKVPool(DSATokenToKVPool):
    """SGLang's DSA pool with torch in place of CUDA kernels.

    `kv_buffer[layer]` is `[size + 64, 1, 576]` in FP32 or BF16, or `[size + 64, 1, 656]` uint8 for
    packed rows. Slot 0 up to 63 is the page that padding writes to.
    """

    def __init__(self, size: int, page_size: int, *args: Any, **kwargs: Any) -> None:
        check_pool_size(size, page_size)
        check_row_format(
            kwargs["dtype"],
            kwargs["kv_cache_dim"],
            kwargs["kv_lora_rank"],
            kwargs["qk_rope_head_dim"],
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
        check_slots("latent rows", loc, dst_buffer.shape[0] * self.stripes, padding=True)
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
        cache = self.latent_cache(layer_id)
        check_slots(f"latent rows of layer {layer_id}", slots, cache.shape[0])
        rows = cache[slots, 0]
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

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy latent rows and index keys from `src_loc` to `tgt_loc` in every layer.

        Args:
            tgt_loc: `[num_tokens]` slots, int32 or int64.
            src_loc: As many; all are read before any is written.

        Raises:
            ValueError: the counts differ, or a slot is outside the cache.
        """
        if tgt_loc.shape != src_loc.shape:
            raise ValueError(
                f"moving rows: {len(tgt_loc)} targets for {len(src_loc)} sources, expected as many"
            )
        for slots in (tgt_loc, src_loc):
            check_slots("moving rows", slots, self.size + self.page_size)
        super().move_kv_cache(tgt_loc, src_loc)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> dict[str, list[torch.Tensor]]:
        """Latent rows and index pages of `indices`, for a request that is retracted.

        Args:
            indices: `[num_tokens]` slots of its positions in order, from a page's start.
            mamba_indices: Unused: the model has no recurrent state.
            req_pool_index: Unused.

        Returns:
            One tensor a layer each: `kv` `[num_tokens, 1, 576 or 656]`, `index_k` `[num_pages, ...]`
            with no pages for shared layers.

        Raises:
            ValueError: a slot is outside the cache, or the slots are not whole pages in order.
        """
        self._check_export("saving a request's cache", indices)
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
        """Put what `get_cpu_copy` saved into the slots `indices`, both halves or none.

        Args:
            kv_cache_cpu_dict: What `get_cpu_copy` returned, of a pool of this kind.
            indices: As many slots as were saved, from a page's start.
            mamba_indices: Unused.
            req_pool_index: Unused.

        Raises:
            ValueError: the slots are not whole pages in order, or what was saved has another length
                or format. Nothing has been written then.
        """
        op = "restoring a request's cache"
        self._check_export(op, indices)
        rows = self._stripe_of_run(indices)
        check_saved_rows(op, self.kv_buffer, kv_cache_cpu_dict["kv"], len(rows))
        self.index_key_cache.check_cpu_copy(kv_cache_cpu_dict["index_k"], indices)
        for buffer, saved in zip(self.kv_buffer, kv_cache_cpu_dict["kv"], strict=True):
            buffer[rows] = saved
        self.index_key_cache.load_cpu_copy(kv_cache_cpu_dict["index_k"], indices)

    def _check_export(self, op: str, indices: torch.Tensor) -> None:
        check_slots(op, indices, (self.size + self.page_size) * self.stripes)
        check_page_runs(op, indices)
