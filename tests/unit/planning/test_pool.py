"""KV bytes against what SGLang's own pool allocates for a tiny model, on the CPU."""

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from sglang_glm.config import GlmDsaConfig
from sglang_glm.planning import kv_cache
from sglang_glm.planning.released import RELEASED

TINY = GlmDsaConfig.from_hf(
    RELEASED["zai-org/GLM-5.3"] | {"num_hidden_layers": 8, "first_k_dense_replace": 2}
)


def allocated_bytes(kv_dtype, num_tokens, skip_topk_layers):
    torch_dtype = torch.bfloat16 if kv_dtype == "bf16" else torch.float8_e4m3fn
    row_elements = 656 if kv_dtype == "fp8_packed" else 576
    with get_parallel().override(attn_dcp_size=1, dcp_enabled=False, attn_tp_size=1):
        pool = DSATokenToKVPool(
            size=num_tokens,
            page_size=64,
            kv_lora_rank=TINY.kv_lora_rank,
            dtype=torch_dtype,
            qk_rope_head_dim=TINY.qk_rope_head_dim,
            layer_num=len(skip_topk_layers),
            device="cpu",
            index_head_dim=TINY.index_head_dim,
            enable_memory_saver=False,
            kv_cache_dim=row_elements,
            start_layer=0,
            end_layer=len(skip_topk_layers),
            skip_topk_layers=skip_topk_layers,
        )
    latent = sum(buffer.nbytes for buffer in pool.kv_buffer)
    index = sum(buffer.nbytes for buffer in pool.index_key_cache.buffer)
    return latent, index


@pytest.mark.parametrize("kv_dtype", kv_cache.KV_DTYPES)
@pytest.mark.parametrize("num_tokens", [64, 640])
def test_target_pool(kv_dtype, num_tokens):
    shared = [kind == "shared" for kind in TINY.indexer_types]
    assert 0 < sum(shared) < len(shared)
    latent, index = allocated_bytes(kv_dtype, num_tokens, shared)
    # One page more than the tokens: page 0 takes the writes of padded rows.
    rows = num_tokens + kv_cache.PAGE_SIZE
    assert latent == rows * kv_cache.latent_bytes_per_token(TINY, kv_dtype)
    assert index == rows * kv_cache.index_bytes_per_token(TINY)


def test_draft_pool():
    latent, index = allocated_bytes("fp8_packed", 128, [False])
    assert latent + index == (128 + 64) * kv_cache.mtp_bytes_per_token(TINY, "fp8_packed")
