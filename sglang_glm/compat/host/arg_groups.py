"""Argument resolution on the CPU: the steps of SGLang that ask CUDA for its capability."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of

from sglang_glm.attention import registry

#: KV dtypes that the CPU pool stores, by SGLang's names for them.
KV_CACHE_DTYPES = {
    "auto": None,
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
}

_STOCK_TOPK = "sgl-kernel"


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
        ValueError: the dtype is none of `KV_CACHE_DTYPES`.
    """
    if view.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {view.kv_cache_dtype}: the CPU pool stores {', '.join(KV_CACHE_DTYPES)}. "
            "Leave the flag out to use the model's dtype."
        )
    return {"kv_cache_dtype": "bfloat16"} if view.kv_cache_dtype == "bf16" else {}


def dsa_split_backend_resolution(view: Any) -> dict[str, str]:
    """Fill in our CPU backends where no flag names one; refuse a name that cannot serve here.

    Raises:
        ValueError: a flag names a backend that cannot run on the CPU; says which can.
    """
    kv_dtype = KV_CACHE_DTYPES[view.kv_cache_dtype] or str(
        model_config_of(view).dtype
    ).removeprefix("torch.")
    declared: dict[str, str] = {}
    for phase in ("prefill", "decode", "topk"):
        field = f"dsa_{phase}_backend"
        name = getattr(view, field)
        # SGLang's top-k flag has a default of its own, so its value does not tell who chose it.
        if name is None or (phase == "topk" and name == _STOCK_TOPK):
            declared[field] = registry.HOST_DEFAULTS[phase]
            continue
        reason = registry.refusal(phase, name, device="cpu", kv_dtype=kv_dtype)
        if reason is not None:
            raise ValueError(f"--{field.replace('_', '-')}: {reason}")
    return declared
