"""The pool of one rank of a group that shares one cache, page by page.

Each rank persists the pages that it owns, latent rows and index keys alike. During a prefill nothing
is read from there: the prefix of the batch is gathered into a scratch one layer ahead, the batch's own
rows are written to the scratch as well, and the layer reads the scratch. SGLang's scheduler and
allocator see the logical slots of all ranks; slots to read from are those of the scratch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from glm_kernels.cache.layout import PAGE_SIZE
from sglang.srt.mem_cache.memory_pool import unwrap_write_loc
from sglang.srt.mem_cache.page_interleave_pool import PageInterleaveKVPoolMixin

from sglang_glm.memory.checks import check_slots
from sglang_glm.memory.index_key_cache import GlmIndexKeyCache, lazy_zeros
from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool
from sglang_glm.parallel.page_shards import GatherPlan, PageShard, ScratchSize, plan_gather
from sglang_glm.parallel.prefix_gather import AllGather, PrefixGather, all_gather_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.page_interleave import PageShardSpec

logger = logging.getLogger(__name__)


class GlmDsaShardedTokenToKVPool(PageInterleaveKVPoolMixin, GlmDsaTokenToKVPool):
    """One rank's pages, and the scratch that a batch reads.

    `size` and the buffers are this rank's; slots that come in are logical, `world_size` times as many.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        *args: Any,
        shard_spec: PageShardSpec,
        shard_group: Any,
        all_gather: AllGather | None = None,
        **kwargs: Any,
    ) -> None:
        """Allocate the pages and the scratch.

        Args:
            size: Tokens of this rank, without the padding page.
            page_size: 64.
            args: Of the pool of one rank.
            shard_spec: SGLang's: rank, group size, and tokens of the scratch.
            shard_group: SGLang's group coordinator of the ranks.
            all_gather: Stands in for a collective over `shard_group`.
            kwargs: Of the pool of one rank.

        Raises:
            ValueError: the pages are not of 64 tokens, or the scratch does not consist of pages.
        """
        spec = shard_spec
        if page_size != PAGE_SIZE or spec.max_prefix_tokens % (spec.shard_size * PAGE_SIZE):
            raise ValueError(
                f"sharded pages have {page_size} tokens and a prefix scratch of {spec.max_prefix_tokens}, "
                f"expected {PAGE_SIZE} and whole pages of all {spec.shard_size} ranks"
            )
        self.shard_spec = spec
        self.shard_group = shard_group
        self.shard = PageShard(rank=spec.shard_rank, world_size=spec.shard_size)
        self._scratch_size = ScratchSize(
            prefix_pages=spec.max_prefix_tokens // PAGE_SIZE,
            new_pages=spec.chunk_tokens // PAGE_SIZE,
        )
        self._plan: GatherPlan | None = None
        super().__init__(size, page_size, *args, **kwargs)
        self._latent_scratch, self._index_scratch = self._create_scratch()
        self._gather = PrefixGather(
            self.shard,
            all_gather or all_gather_beside(shard_group.device_group),
            sources=[
                (_by_page(latents), index_pages)
                for latents, index_pages in zip(
                    self.kv_buffer, self.index_key_cache.buffer, strict=True
                )
            ],
            scratch=(self._half_by_page(0), self._half_by_page(1)),
        )
        logger.info(
            "Sharded cache, rank %d of %d: %d tokens in %d bytes, scratch %d bytes",
            self.shard.rank,
            self.shard.world_size,
            size,
            self.get_kv_size_bytes(),
            sum(half.nbytes for half in (*self._latent_scratch, *self._index_scratch)),
        )

    def _create_index_key_cache(self) -> GlmShardedIndexKeyCache:
        return GlmShardedIndexKeyCache(self, self.index_buf_size)

    def _create_scratch(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Two halves each of latent rows and of index pages, in the layers' own forms."""
        num_pages = self._scratch_size.num_pages
        rows = (num_pages * PAGE_SIZE, *self.kv_buffer[0].shape[1:])
        pages = (num_pages, *self.index_key_cache.buffer[0].shape[1:])
        return (
            [lazy_zeros(rows, self.store_dtype) for _ in range(2)],
            [lazy_zeros(pages, self.index_k_with_scale_buffer_dtype) for _ in range(2)],
        )

    def _half_by_page(self, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One half of the scratch as it is gathered: latents and index keys, a page a row."""
        return _by_page(self._latent_scratch[half]), self._index_scratch[half]

    @property
    def num_logical_slots(self) -> int:
        """Slots of all ranks, the padding pages included."""
        return (self.size + self.page_size) * self.shard.world_size

    def begin_shard_extend(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
    ) -> None:
        """Plan a prefill batch and start to gather its first layer.

        Args:
            req_to_token: `[max_requests, max_context]` logical slots of each request's positions.
            req_pool_indices: `[batch_size]` rows of it.
            prefix_lens_cpu: Cached positions of each request, whole pages.
            seq_lens_cpu: Positions of each request, new ones included.

        Raises:
            ValueError: a prefix ends within a page, or the batch does not fit the scratch.
        """
        prefixes, new_pages = [], []
        for request, (prefix_len, seq_len) in enumerate(
            zip(prefix_lens_cpu, seq_lens_cpu, strict=False)
        ):
            if int(prefix_len) % PAGE_SIZE:
                raise ValueError(
                    f"request {request} has {int(prefix_len)} cached positions, expected whole pages of "
                    f"{PAGE_SIZE}: their keys are gathered page by page"
                )
            slots = req_to_token[int(req_pool_indices[request])]
            pages = slots[: int(seq_len) : PAGE_SIZE].long() // PAGE_SIZE
            first_new = int(prefix_len) // PAGE_SIZE
            prefixes.append(pages[:first_new])
            new_pages.append(pages[first_new:])
        self._plan = plan_gather(
            self.shard,
            prefixes,
            torch.cat(new_pages),
            size=self._scratch_size,
            num_logical_pages=self.num_logical_slots // PAGE_SIZE,
        )
        self._gather.begin(self._plan)

    def end_shard_extend(self) -> None:
        """A forward that is no prefill follows: it may read nothing."""
        self._plan = None

    def translate_loc_to_scratch(self, loc: torch.Tensor) -> torch.Tensor:
        """Slots of the scratch for logical slots, int64; negative outside the batch's pages."""
        return self._active_plan().slots(loc)

    def scratch(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent rows and index pages of the batch in one layer, as the pool of one rank has them.

        Layers are asked for in order, each by every rank: the next one is being gathered on return.
        """
        self._active_plan()
        half = self._gather.half(layer_id - self.start_layer)
        return self._latent_scratch[half], self._index_scratch[half]

    def _active_plan(self) -> GatherPlan:
        if self._plan is None:
            raise RuntimeError(
                "a rank holds only its pages of a sharded cache, and gathers the others for prefill "
                "alone: decode on a server without --enable-kv-cache-sharding"
            )
        return self._plan

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the batch's rows to the scratch, and those in this rank's pages to its cache.

        Args:
            layer: The attention layer.
            loc_info: Logical slots `[num_tokens]`; negative ones are skipped.
            cache_k_nope: `[num_tokens, 1, 512]` latents of all rows of the batch.
            cache_k_rope: `[num_tokens, 1, 64]` rotary parts.
            layer_id_override: Layer to write to instead.

        Raises:
            ValueError: a slot is outside the logical cache.
        """
        slots = unwrap_write_loc(loc_info)[0]
        check_slots("latent rows", slots, self.num_logical_slots, padding=True)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        if self._plan is not None:
            latents, _ = self.scratch(layer_id)
            staged = self.translate_loc_to_scratch(slots)
            self._write_mla_kv_buffer(latents, staged, cache_k_nope, cache_k_rope)
        mine, rows = self.shard.owned(slots)
        super().set_mla_kv_buffer(
            layer, rows, cache_k_nope[mine], cache_k_rope[mine], layer_id_override
        )

    def latent_cache(self, layer_id: int) -> torch.Tensor:
        """The scratch of a layer, `[scratch_slots, 1, 576 or 656]`."""
        return self.scratch(layer_id)[0]

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents `[num_tokens, 1, 512]` and rotary parts `[num_tokens, 1, 64]` of logical slots."""
        slots = self.translate_loc_to_scratch(unwrap_write_loc(loc)[0])
        return super().get_mla_kv_buffer(layer, slots, dst_dtype)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Refused: source and target may be of different ranks."""
        _refuse_export("moving rows")

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> NoReturn:
        """Refused: the copy would be of one rank's pages."""
        _refuse_export("saving a request's cache")

    def load_cpu_copy(
        self,
        kv_cache_cpu_dict: dict[str, list[torch.Tensor]],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Refused, as the copy is."""
        _refuse_export("restoring a request's cache")


class GlmShardedIndexKeyCache(GlmIndexKeyCache):
    """Index keys of this rank's pages, and of the batch's pages in the scratch."""

    pool: GlmDsaShardedTokenToKVPool

    def keys(self, layer_id: int) -> torch.Tensor:
        """The scratch of a layer in the form that `glm_kernels.indexer` reads; empty if shared."""
        own = super().keys(layer_id)
        return self._as_keys(self.pool.scratch(layer_id)[1]) if own.shape[0] else own

    def store(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor) -> None:
        """Write the batch's keys to the scratch, and those in this rank's pages to its cache.

        Args:
            layer_id: A full layer.
            slots: `[num_tokens]` logical slots, int32 or int64; negative ones are skipped.
            k: `[num_tokens, 128]` float; quantised here where the cache holds FP8 pages.

        Raises:
            RuntimeError: the layer is a shared one, or no prefill is under way.
            ValueError: a slot is outside the logical cache, or `k` has another shape.
        """
        check_slots(
            f"index keys of layer {layer_id}", slots, self.pool.num_logical_slots, padding=True
        )
        super().store(layer_id, self.pool.translate_loc_to_scratch(slots), k)
        mine, own_slots = self.pool.shard.owned(slots)
        self._write(f"index keys of layer {layer_id}", super().keys(layer_id), own_slots, k[mine])


def _by_page(rows: torch.Tensor) -> torch.Tensor:
    """`[num_slots, 1, dim]` latent rows as `[num_pages, 64 * dim]`."""
    return rows.view(-1, PAGE_SIZE * rows.shape[-1])


def _refuse_export(op: str) -> NoReturn:
    raise NotImplementedError(
        f"{op}: a rank of a sharded cache holds only its own pages; serve without "
        "--enable-kv-cache-sharding"
    )
