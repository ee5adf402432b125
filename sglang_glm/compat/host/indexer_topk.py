"""Selections of the indexer in the answer of a request (`--enable-return-indexer-topk`), on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.configs.model_config import get_num_indexer_layers
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule
from sglang.srt.state_capturer.base import BaseDeviceCache, BaseHostCache, BaseTopkCapturer

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


def create_indexer_capturer(
    *, model_config: ModelConfig, num_tokens: int, max_running_requests: int, device: str
) -> HostIndexerTopkCapturer | None:
    """Keep every row's selection where the flag asks for it.

    Args:
        model_config: Of the target model.
        num_tokens: Slots of the pool; the selection of a token is kept beside its slot.
        max_running_requests: Bounds the rows of a decode batch.
        device: "cpu".

    Returns:
        The capturer, or None without the flag.

    Raises:
        ValueError: If attention is divided over ranks, whose captures SGLang does not join.
    """
    if not get_exec().features.enable_return_indexer_topk:
        return None
    if get_parallel().attn_tp_size != 1:
        raise ValueError(
            f"--enable-return-indexer-topk: attention is divided over {get_parallel().attn_tp_size} "
            "ranks, expected 1; leave the flag out or set --attn-dp-size to --tp-size"
        )
    config = model_config.hf_text_config
    return HostIndexerTopkCapturer(
        num_tokens=num_tokens,
        max_batch_size=max(get_schedule().chunked_prefill_size, max_running_requests),
        num_layers=get_num_indexer_layers(config),
        topk_size=config.index_topk,
    )


class HostIndexerTopkCapturer(BaseTopkCapturer):
    """SGLang's capturer over pageable memory: it pins its buffer through the CUDA driver."""

    def __init__(
        self, *, num_tokens: int, max_batch_size: int, num_layers: int, topk_size: int
    ) -> None:
        # SGLang's constructor is what allocates pinned memory, so it is not called.
        self.num_layers = num_layers
        self.topk_size = topk_size
        self.host_cache = _PageableCache(num_tokens, num_layers, topk_size)
        self.device_cache = BaseDeviceCache(
            max_batch_size, num_layers, topk_size, device="cpu", name="indexer_topk"
        )


class _PageableCache(BaseHostCache):
    """`[num_tokens, num_layers, topk_size]` int32; -1 where nothing was selected."""

    def __init__(self, num_tokens: int, num_layers: int, topk_size: int) -> None:
        self.buffer = torch.full((num_tokens, num_layers, topk_size), -1, dtype=torch.int32)
        self.num_tokens = num_tokens
        self.num_layers = num_layers
        self.topk_size = topk_size
        self.name = "indexer_topk"
