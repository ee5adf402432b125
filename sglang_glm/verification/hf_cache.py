"""A transformers cache that stores what the serving caches would store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache, DynamicIndexedLayer

from sglang_glm.verification.formats import CacheFormats, round_index, round_latent, round_rope

if TYPE_CHECKING:
    import torch


class RoundingLayer(DynamicIndexedLayer):
    """One layer's cache, rounding rows as they are written.

    transformers reads every key back from the cache, the current tokens' included, so rounding on
    write is all that a format needs.
    """

    # transformers registers subclasses that name a layer type; this one is passed by hand.
    _layer_type = None

    def __init__(self, formats: CacheFormats) -> None:
        super().__init__()
        self.formats = formats

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the latent (passed as keys) and the rotated key part (passed as values).

        Args:
            key_states: ``[1, 1, tokens, kv_lora_rank]``.
            value_states: ``[1, 1, tokens, qk_rope_head_dim]``.
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            Both for the whole sequence.
        """
        return super().update(
            round_latent(key_states, self.formats),
            round_rope(value_states, self.formats),
            *args,
            **kwargs,
        )

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys.

        Args:
            indexer_key_states: ``[1, tokens, index_head_dim]``, after LayerNorm and RoPE.

        Returns:
            The keys of the whole sequence.
        """
        return super().update_indexer(round_index(indexer_key_states, self.formats.index_key))


def rounding_cache(num_layers: int, formats: CacheFormats) -> Cache:
    """Make an empty cache.

    Args:
        num_layers: Layers of the model it serves.
        formats: What each layer rounds to.

    Returns:
        The cache.
    """
    return Cache(layers=[RoundingLayer(formats) for _ in range(num_layers)])


def truncate_cache(cache: Cache, length: int) -> None:
    """Forget all positions from ``length`` on.

    Args:
        cache: From :func:`rounding_cache`.
        length: Positions to keep.
    """
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        if layer.is_indexer_initialized:
            layer.indexer_keys = layer.indexer_keys[:, :length]
