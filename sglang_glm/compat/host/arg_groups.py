"""Argument resolution on the CPU: the steps of SGLang that ask CUDA for its capability."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

from sglang_glm.attention import registry
from sglang_glm.compat.refusals import STOCK_TOPK

logger = logging.getLogger(__name__)

#: What the CPU pool stores, by the names of `--kv-cache-dtype`.
_KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")


@contextmanager
def _no_cuda_capability() -> Iterator[None]:
    """SGLang's DSA branch reads the capability of a device that is not there; the answer is unused."""
    stock = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = stock


def handle_cpu_backends(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Sample with torch; leave the attention backend to the platform and the model."""
    declare_resolution(server_args, "sglang_glm", sampling_backend="pytorch")


def handle_model_specific_adjustments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run the stock step without a CUDA device."""
    with _no_cuda_capability():
        previous(server_args)


def dsa_kv_cache_dtype_default(view: Any) -> dict[str, str]:
    """Accept the dtypes of the CPU pool; "auto" follows the model's dtype, FP32 included.

    Raises:
        ValueError: the dtype is none of `_KV_CACHE_DTYPES`, or follows a model in FP16.
    """
    if view.kv_cache_dtype not in _KV_CACHE_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {view.kv_cache_dtype}: the CPU pool stores "
            f"{', '.join(_KV_CACHE_DTYPES)}. Leave the flag out to use the model's dtype."
        )
    if view.kv_cache_dtype == "auto" and model_config_of(view).dtype == torch.float16:
        raise ValueError(
            "--dtype float16 (or dtype in config.json): the CPU pool stores no float16 latents; choose "
            "--dtype bfloat16 or float32, or add --kv-cache-dtype bf16"
        )
    return {"kv_cache_dtype": "bfloat16"} if view.kv_cache_dtype == "bf16" else {}


def dsa_split_backend_resolution(view: Any) -> dict[str, str]:
    """Fill in our CPU backends where no flag names one; `refusals` has refused any other name."""
    declared = {}
    for phase, default in registry.HOST_DEFAULTS.items():
        field = f"dsa_{phase}_backend"
        if getattr(view, field) in (None, STOCK_TOPK):
            declared[field] = default
    logger.info(
        "DSA on the CPU: %s",
        ", ".join(
            f"{p} {declared.get(f'dsa_{p}_backend', 'as given')}" for p in registry.HOST_DEFAULTS
        ),
    )
    return declared
