"""Our CUDA backend around tensors, without a model runner: any device, tiny sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from glm_kernels.cache.store_mla_kv import store_mla_kv

from sglang_glm.attention.cuda_choice import BF16, FP8
from sglang_glm.compat.cuda.dsa_backend import GlmDsaCudaAttnBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

SCALE = 0.0625


class Pool:
    """One layer's latent rows, with the calls that a backend makes."""

    def __init__(self, num_slots: int, packed: bool, device: str) -> None:
        generator = torch.Generator().manual_seed(7)
        latent = torch.randn(num_slots, 512, generator=generator).bfloat16().to(device)
        rope = torch.randn(num_slots, 64, generator=generator).bfloat16().to(device)
        shape, dtype = ((num_slots, 1, 656), torch.uint8) if packed else ((num_slots, 1, 576), None)
        self.rows = torch.zeros(shape, dtype=dtype or torch.bfloat16, device=device)
        self.packed = packed
        store_mla_kv(self.rows, torch.arange(num_slots, device=device), latent, rope)

    def set_mla_kv_buffer(self, layer: Any, loc: torch.Tensor, k: Any, k_rope: Any) -> None:
        store_mla_kv(self.rows, loc, k.view(-1, 512), k_rope.view(-1, 64))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows.view(torch.float8_e4m3fn) if self.packed else self.rows


def backend(
    *,
    heads: int,
    packed: bool = True,
    impl: str = "glm_sparse",
    decides: bool = False,
    next_n: int = 1,
    num_slots: int = 640,
    topk: int = 8,
    device: str = "cpu",
    **fields: Any,
) -> GlmDsaCudaAttnBackend:
    """A backend with the fields that stock's constructor would have set."""
    made = object.__new__(GlmDsaCudaAttnBackend)
    defaults = {
        "_decides": decides,
        "_kv_dtype": FP8 if packed else BF16,
        "_union_of": None,
        "dcp_size": 1,
        "device_capability": (9, 0),
        "dsa_decode_impl": impl,
        "dsa_index_kpool": 1,
        "dsa_index_topk": topk,
        "dsa_kv_cache_store_fp8": packed,
        "dsa_prefill_impl": impl,
        "dsa_topk_backend": None,
        "forward_metadata": None,
        "hisparse_coordinator": None,
        "num_q_heads": heads,
        "physical_page_size": 64,
        "req_to_token": torch.randperm(num_slots).view(-1, 64).int().to(device),
        "speculative_num_draft_tokens": next_n,
        "speculative_num_steps": 0,
        "speculative_step_id": 0,
        "token_to_kv_pool": Pool(num_slots, packed, device),
        "topk": 1,
        "use_fused_topk": True,
        "use_mha": False,
    }
    for name, value in {**defaults, **fields}.items():
        setattr(made, name, value)
    return made


def call(
    made: GlmDsaCudaAttnBackend,
    mode: ForwardMode,
    q: torch.Tensor,
    topk_indices: torch.Tensor,
    **batch: Any,
) -> torch.Tensor:
    """Attend with queries `[rows, heads, 576]` that are handed over in two parts."""
    heads = q.shape[1]
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, v_head_dim=512, head_dim=576, scaling=SCALE
    )
    forward = made.forward_decode if mode.is_decode() else made.forward_extend
    return forward(
        q[..., :512].contiguous(),
        batch.pop("k", None),
        None,
        layer,
        SimpleNamespace(forward_mode=mode, **batch),
        q_rope=q[..., 512:].contiguous(),
        k_rope=batch.pop("k_rope", None),
        topk_indices=topk_indices,
    )


def selections(rows: int, topk: int, num_slots: int, device: str = "cpu") -> torch.Tensor:
    """`[rows, topk]` int32 slots, none twice in a row, the last two entries empty."""
    generator = torch.Generator().manual_seed(rows)
    picked = torch.stack(
        [torch.randperm(num_slots, generator=generator)[:topk] for _ in range(rows)]
    )
    picked[:, -2:] = -1
    return picked.int().to(device)
