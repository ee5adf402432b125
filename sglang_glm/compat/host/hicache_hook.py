"""The host tier (`--enable-hierarchical-cache`) on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

from sglang_glm.compat.host.refusals import refuse
from sglang_glm.config import is_glm_moe_dsa

_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def handle_hicache(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Copy with `--hicache-io-backend direct`, whatever else SGLang resolves.

    Raises:
        ValueError: names the flag, the reason and what to do.
    """
    view = resolving_view(server_args)
    if view.enable_hierarchical_cache:
        refuse(_refusals(view))
    # A decode server may keep retracted requests in the same host pools.
    if view.enable_hierarchical_cache or view.disaggregation_mode == "decode":
        # "kernel" is the flag's default, so that its value does not tell whether anybody chose it.
        declare_resolution(server_args, "sglang_glm", hicache_io_backend="direct")
    previous(server_args)


def _refusals(view: Any) -> Iterator[tuple[str, bool, str]]:
    architectures = model_config_of(view).hf_config.architectures or []
    yield (
        f"--enable-hierarchical-cache for {', '.join(architectures)}",
        not is_glm_moe_dsa(architectures),
        "only the host pools of glm_moe_dsa have copies without CUDA; leave the flag out",
    )
    yield (
        f"--hicache-mem-layout {view.hicache_mem_layout}",
        view.hicache_mem_layout not in _LAYOUTS,
        f"it is another accelerator's; use one of {', '.join(_LAYOUTS)}",
    )
    yield (
        f"--hicache-io-backend {view.hicache_io_backend}",
        view.hicache_io_backend == "kernel_ascend",
        "it is another accelerator's; leave the flag out",
    )
    yield (
        f"--hicache-storage-backend {view.hicache_storage_backend}",
        view.hicache_storage_backend is not None,
        "its pages pass through pinned memory, which needs a CUDA driver; leave the flag out",
    )
