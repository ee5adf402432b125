"""A cache sharded over ranks (`--enable-kv-cache-sharding`) on the CPU: flags at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view, resolving_view

from sglang_glm.compat.host.refusals import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FLAG = "--enable-kv-cache-sharding"


def handle_kv_cache_sharding(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what the CPU's sharded cache does not carry, then check what every device's does not.

    Raises:
        ValueError: names the flags, the reason and what to do.
    """
    view = resolving_view(server_args)
    if view.enable_kv_cache_sharding:
        refuse((f"{FLAG} {flag}", is_set, reason) for flag, is_set, reason in _refusals(view))
    previous(server_args)


def validate_kv_shard_attention_backend(
    original: Callable[..., None], server_args: Any, cfg: Any = None
) -> None:
    """AROUND hook: let our sparse forms on the CPU read a sharded cache."""
    prefill_backend, _ = attention_backends_of(resolved_view(server_args))
    if prefill_backend != "dsa":
        original(server_args, cfg)


def _refusals(view: Any) -> Iterator[tuple[str, bool, str]]:
    yield (
        "without --disaggregation-mode prefill",
        view.disaggregation_mode != "prefill",
        "a rank holds only its own pages, and gathers the others for prefill alone; decode on another "
        "server",
    )
    yield (
        f"with --speculative-algorithm {view.speculative_algorithm}",
        view.speculative_algorithm is not None,
        "SGLang builds no sharded cache for a draft of an out-of-tree platform; leave one of them out",
    )
    yield (
        "with --enable-hierarchical-cache",
        view.enable_hierarchical_cache,
        "ranks write out pages of their own with CUDA kernels; leave one of them out",
    )
    yield (
        "with --enable-dsa-cache-layer-split",
        view.enable_dsa_cache_layer_split,
        "both divide the same cache, by pages and by layers; leave one of them out",
    )
    yield (
        f"with --pp-size {view.pp_size}",
        view.pp_size > 1,
        "each stage would gather a prefix of its own; leave one of them out",
    )
    yield (
        f"with --attn-dp-size {view.attn_dp_size}",
        view.attn_dp_size > 1,
        "several groups that share a cache each are untested; leave one of them out",
    )
    yield (
        f"with --disaggregation-transfer-backend {view.disaggregation_transfer_backend}",
        view.disaggregation_transfer_backend != "nixl",
        "a rank's pages were handed over by NIXL alone so far; choose nixl",
    )
