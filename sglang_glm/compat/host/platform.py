"""The CPU as an out-of-tree SGLang platform."""

import os
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_glm.compat.host.bootstrap import share_cores

#: What a user of this platform should not have to know; each is only a default.
#: - compiling the first forward costs 20 s and gains nothing at these sizes;
#: - CUDA crash dumps and py-spy dumps delay a failing process's exit by many seconds;
#: - threads that spin at a barrier take the core that the thread they wait for needs;
#: - cos/sin in the model's dtype loses positions beyond a few thousand in BF16.
_ENVIRONMENT_DEFAULTS = {
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_ROPE_CACHE_FP32": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def set_environment_defaults() -> None:
    """Set the variables of `_ENVIRONMENT_DEFAULTS` that the user has not set."""
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


#: A CPU host is shared with its owner's other work, and serves a few requests at a time.
_MEM_FRACTION_STATIC = 0.25
_MAX_RUNNING_REQUESTS = 32


class HostSRTPlatform(SRTPlatform):
    """Serves on the CPU with plain torch: no AMX, no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        super().__init__()
        set_environment_defaults()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open with values for a shared host of a few cores."""
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = _MEM_FRACTION_STATIC
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_RUNNING_REQUESTS
        if server_args.attn_dp_size == 1:
            # The scheduler polls in a tight loop otherwise, and takes a core while nobody asks anything.
            server_args.sleep_on_idle = True
        # Its kernels are CUDA's; SGLang would try, and warn, in every group.
        server_args.disable_custom_all_reduce = True
        num_ranks = server_args.dp_size * server_args.tp_size * server_args.pp_size
        share_cores(num_ranks // server_args.nnodes)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of RAM in this machine."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes of RAM that are not available, whoever uses them."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """`(available, total)` bytes of RAM."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> str:
        """The one CPU device, whichever rank asks."""
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """Nothing to select on a CPU."""

    def get_device_name(self, device_id: int = 0) -> str:
        """Name for logs."""
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        """The machine's own; a CPU has none."""
        return f"cpu-{uuid.getnode():012x}"

    def get_device_capability(self, device_id: int = 0) -> None:
        """CUDA's measure of a device; a CPU has none."""

    def get_torch_profiler_activity_str(self) -> str:
        """What `/start_profile` records here."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """What `/start_profile` records here."""
        return torch.profiler.ProfilerActivity.CPU

    def get_torch_distributed_backend_str(self) -> str:
        """The process-group backend of every rank."""
        return "gloo"

    def get_default_attention_backend(self) -> str:
        """For models without sparse attention; `glm_moe_dsa` asks for `dsa` itself."""
        return "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Drafts attend as their target does."""
        return "dsa"

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Our pool for sparse attention; the in-tree one otherwise."""
        if kind != "dsa":
            return None
        from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool

        return GlmDsaTokenToKVPool

    def get_quantization_config(self, quantization: str) -> type | None:
        """FP8 checkpoints with activations in any dtype; SGLang's own class otherwise."""
        if quantization != "fp8":
            return None
        from sglang_glm.compat.host.fp8_config import HostFp8Config

        return HostFp8Config

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """EAGLE, which GLM's MTP layer runs under."""
        return algorithm in ("EAGLE", "NEXTN")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """The sparse backend drafts for GLM."""
        return backend == "dsa"

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Our lookup of the slots that verify and draft extend write to."""
        from sglang_glm.compat.host.cache_locs import assign_extend_cache_locs

        return assign_extend_cache_locs

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Compilation is off on this platform."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        """Fused ops take their plain-torch form."""
        return "native"
