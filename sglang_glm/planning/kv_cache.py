"""Bytes that a cached token occupies, and where they live.

Row formats are those of SGLang 0.5.23's `DSATokenToKVPool`: the latent row of every layer, and an
index key on layers that own an indexer, in pages of 64 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from glm_kernels.cache.layout import MLA_GROUP, PAGE_SIZE

if TYPE_CHECKING:
    from sglang_glm.config import GlmDsaConfig
    from sglang_glm.planning.layout import ParallelLayout

KvDtype = Literal["fp8_packed", "bf16", "fp8_plain"]
KV_DTYPES: tuple[KvDtype, ...] = ("fp8_packed", "bf16", "fp8_plain")


def latent_row_bytes(config: GlmDsaConfig, kv_dtype: KvDtype) -> int:
    """Bytes of one token's latent row in one layer.

    * `fp8_packed`: FP8 latent, one FP32 scale per 128 of it, BF16 RoPE part (656 B for GLM): the
      format of the FlashMLA kernels on Hopper;
    * `bf16`: two bytes an element (1152 B);
    * `fp8_plain`: one byte an element and no scales (576 B): the format of the TRT-LLM kernels on
      Blackwell.
    """
    if kv_dtype == "bf16":
        return 2 * config.latent_dim
    if kv_dtype == "fp8_plain":
        return config.latent_dim
    if kv_dtype == "fp8_packed":
        scales = config.kv_lora_rank // MLA_GROUP
        return config.kv_lora_rank + 4 * scales + 2 * config.qk_rope_head_dim
    raise ValueError(f"plan: kv_dtype is {kv_dtype!r}, expected one of {KV_DTYPES}")


def index_key_bytes(config: GlmDsaConfig) -> int:
    """Bytes of one token's index key: FP8 and one FP32 scale per key of 128 (132 B for GLM)."""
    return config.index_head_dim + 4


def index_page_bytes(config: GlmDsaConfig) -> int:
    """Bytes of an index page of 64 tokens: all keys, then all scales (8448 B for GLM)."""
    return PAGE_SIZE * index_key_bytes(config)


def latent_elements_per_token(config: GlmDsaConfig) -> int:
    """Cached elements of the decoder layers, index keys and MTP layer not counted."""
    return config.latent_dim * config.num_hidden_layers


def latent_bytes_per_token(config: GlmDsaConfig, kv_dtype: KvDtype) -> int:
    """Latent bytes of the decoder layers."""
    return latent_row_bytes(config, kv_dtype) * config.num_hidden_layers


def index_bytes_per_token(config: GlmDsaConfig) -> int:
    """Index bytes of the decoder layers: only full layers keep keys."""
    return index_key_bytes(config) * len(config.full_index_layer_ids)


def mtp_bytes_per_token(config: GlmDsaConfig, kv_dtype: KvDtype) -> int:
    """Bytes of the MTP layer's own latent row and index key, 0 for a model without one."""
    row = latent_row_bytes(config, kv_dtype) + index_key_bytes(config)
    return row * config.num_nextn_predict_layers


def kv_bytes_per_token(config: GlmDsaConfig, kv_dtype: KvDtype, *, with_mtp: bool) -> int:
    """All bytes of one token, counted once however many GPUs hold copies."""
    total = latent_bytes_per_token(config, kv_dtype) + index_bytes_per_token(config)
    return total + (mtp_bytes_per_token(config, kv_dtype) if with_mtp else 0)


def kv_bytes_per_token_per_gpu(
    config: GlmDsaConfig, layout: ParallelLayout, kv_dtype: KvDtype, *, with_mtp: bool
) -> float:
    """Bytes that one token of a request costs on each GPU that holds the request.

    MLA has one key head, so attention TP copies the cache instead of splitting it. Decode context
    parallelism splits the target's latent rows; SGLang keeps index keys and the draft's cache
    whole on every rank (`pool_configurator`).
    """
    latent = latent_bytes_per_token(config, kv_dtype) / layout.dcp_size
    draft = mtp_bytes_per_token(config, kv_dtype) if with_mtp else 0
    return latent + index_bytes_per_token(config) + draft
