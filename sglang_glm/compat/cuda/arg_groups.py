"""The automatic choice of a decode backend on CUDA."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import model_config_of

from sglang_glm import envs
from sglang_glm.attention import cuda_choice
from sglang_glm.config import is_glm_moe_dsa

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_KV_DTYPES = {"fp8_e4m3": cuda_choice.FP8, "bfloat16": cuda_choice.BF16}


def dsa_split_backend_resolution(
    original: Callable[[Any], dict[str, Any]], view: Any
) -> dict[str, Any]:
    """AROUND hook: `glm_auto` where no flag names a decode backend and ours wins some batch."""
    declared = original(view)
    peer = declared.get("dsa_decode_backend")
    if (
        peer is None
        or envs.CUDA_KERNELS.get() != "auto"
        or not is_glm_moe_dsa(model_config_of(view).hf_config.architectures)
        or view.enable_hisparse
        or (view.dcp_size or 1) > 1
        or view.attn_cp_size > 1
    ):
        return declared
    num_heads = model_config_of(view).num_attention_heads * view.attn_dp_size // view.tp_size
    if not cuda_choice.wins_anywhere(
        num_heads=num_heads,
        kv_dtype=_KV_DTYPES.get(view.kv_cache_dtype, view.kv_cache_dtype),
        peer=peer,
        capability=torch.cuda.get_device_capability(),
    ):
        return declared
    logger.info("DSA decode backend: glm_auto, which keeps %s where ours does not win", peer)
    return {**declared, "dsa_decode_backend": "glm_auto"}
