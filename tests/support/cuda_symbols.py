"""What the CUDA rows of the ledger rely on in SGLang, and a check that needs no GPU."""

from __future__ import annotations

import inspect
import pkgutil

_DSA = "sglang.srt.layers.attention.dsa"
_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_FORWARD = [
    "self",
    "q",
    "k",
    "v",
    "layer",
    "forward_batch",
    "save_kv_cache",
    "q_rope",
    "k_rope",
    "topk_indices",
    "cos_sin_cache",
]

#: Dotted path -> leading parameters that our calls and overrides assume.
SIGNATURES: dict[str, list[str]] = {
    f"{_BACKEND}.forward_decode": _FORWARD,
    f"{_BACKEND}.forward_extend": _FORWARD,
    f"{_BACKEND}._get_fused_topk_page_table": ["self", "topk_indices"],
    f"{_BACKEND}._pad_topk_indices": ["self", "topk_indices", "num_tokens"],
    f"{_BACKEND}.__init__": ["self", "model_runner"],
    f"{_DSA}.dsa_indexer.Indexer._get_topk_paged": [
        "self",
        "forward_batch",
        "layer_id",
        "q_fp8",
        "weights",
        "metadata",
    ],
    f"{_DSA}.dsa_indexer.Indexer._get_topk_ragged": [
        "self",
        "enable_dual_stream",
        "forward_batch",
        "layer_id",
        "q_fp8",
        "weights",
        "metadata",
        "topk_result",
    ],
    f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata.get_indexer_kvcache_range": ["self"],
    f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata.get_seqlens_expanded": ["self"],
    f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata.get_token_to_batch_idx": ["self"],
    f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata.topk_transform": [
        "self",
        "logits",
        "topk",
        "ks",
        "cu_seqlens_q",
        "ke_offset",
        "batch_idx_list",
        "topk_indices_offset_override",
    ],
    f"{_DSA}.dsa_indexer.Indexer._get_index_k_read_buffer": ["pool", "layer_id"],
    f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata.get_seqlens_int32": ["self"],
    f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata.get_page_table_64": ["self"],
    f"{_DSA}.dsa_topk_backend.DSATopKBackend.resolve": ["model_runner"],
    f"{_DSA}.dsa_topk_backend.DSATopKBackend.topk_func": [
        "self",
        "score",
        "lengths",
        "topk",
        "row_starts",
    ],
    f"{_DSA}.dsa_topk_backend.DSATopKBackend.topk_transform": [
        "self",
        "logits",
        "lengths",
        "topk",
        "topk_transform_method",
        "attn_metadata",
        "cu_seqlens_q_topk",
        "topk_indices_offset",
        "row_starts",
        "batch_idx_list",
        "force_unfused_topk",
    ],
    "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution": ["view"],
    "sglang.kernels.ops.attention.utils.concat_mla_absorb_q_general": ["q_nope", "q_rope"],
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer": [
        "self",
        "layer",
        "loc_info",
        "cache_k_nope",
        "cache_k_rope",
    ],
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_key_buffer": ["self", "layer_id"],
    "sglang.srt.model_executor.forward_context.get_token_to_kv_pool": [],
}

#: Names that stock code assigns or defines and ours reads: (class or module, attribute).
ATTRIBUTES: list[tuple[str, str]] = [
    (f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata", "force_unfused_topk"),
    (f"{_DSA}.dsa_indexer_metadata.DSAIndexerMetadata", "topk_backend"),
    ("sglang.srt.layers.attention.dsa_backend.DSAMetadata", "real_page_table"),
    ("sglang.srt.layers.attention.dsa_backend.DSAMetadata", "token_to_batch_idx"),
    ("sglang.srt.environ.envs", "SGLANG_DSA_FUSE_TOPK"),
]

#: Attributes of a backend that its constructor must still set.
BACKEND_FIELDS = [
    "dcp_size",
    "device_capability",
    "dsa_decode_impl",
    "dsa_index_kpool",
    "dsa_index_topk",
    "dsa_kv_cache_store_fp8",
    "dsa_prefill_impl",
    "dsa_topk_backend",
    "hisparse_coordinator",
    "kv_cache_dim",
    "kv_cache_dtype",
    "num_q_heads",
    "physical_page_size",
    "req_to_token",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_step_id",
    "token_to_kv_pool",
    "topk",
    "use_fused_topk",
    "use_mha",
]


def changed_symbols() -> list[str]:
    """What differs from the tables above, a line each."""
    found = []
    for path, expected in SIGNATURES.items():
        try:
            function = inspect.unwrap(pkgutil.resolve_name(path))
        except (ImportError, AttributeError) as error:
            found.append(f"{path}: {error}")
            continue
        parameters = list(inspect.signature(function).parameters)
        # A class method unwraps to a function that still takes the class.
        if parameters[:1] == ["cls"]:
            parameters = parameters[1:]
        if parameters[: len(expected)] != expected:
            found.append(f"{path} takes {parameters}, expected {expected}")
    for owner, name in ATTRIBUTES:
        holder = pkgutil.resolve_name(owner)
        annotated = getattr(holder, "__annotations__", {})
        if name not in annotated and not hasattr(holder, name):
            found.append(f"{owner} has no {name}")
    source = inspect.getsource(pkgutil.resolve_name("sglang.srt.layers.attention.dsa_backend"))
    found += [
        f"no assignment of self.{name} in dsa_backend"
        for name in BACKEND_FIELDS
        if f"self.{name} =" not in source and f"self.{name}:" not in source
    ]
    return found
