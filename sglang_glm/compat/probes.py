"""Probes of seams that are no hooks: what SGLang would really use."""

import pkgutil


def check_host_pool() -> str | None:
    """None when SGLang would build our KV pool for sparse attention."""
    from sglang.srt.platforms import current_platform

    from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool

    found = current_platform.get_kv_pool_cls(kind="dsa")
    return None if found is GlmDsaTokenToKVPool else f"current_platform builds {found!r}"


def check_resolution_hook(step: str, implementation: str) -> str | None:
    """None when `step` of the argument resolution runs our wrapper, given as `module:attribute`."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return (
        None
        if pkgutil.resolve_name(implementation) in _HOOKS.get(step, ())
        else "our wrapper is not registered"
    )


def check_oot_forward(op: type, implementation: object) -> str | None:
    """None when `op` dispatches to our forward on this platform."""
    from sglang.kernels.fused_op import BaseFusedOp, _oot_dispatch_key

    found = BaseFusedOp._oot_forward_registry.get(_oot_dispatch_key(), {}).get(op)
    return None if found is implementation else f"found {found!r}"


def check_indexer() -> str | None:
    """None when the DSA indexer runs our forward."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from sglang_glm.layers.indexer import indexer_forward

    return check_oot_forward(Indexer, indexer_forward)


def check_experts() -> str | None:
    """None when unquantised experts run our forward."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from sglang_glm.layers.experts import experts_forward

    return check_oot_forward(UnquantizedFusedMoEMethod, experts_forward)


def check_speculative_cache_locs() -> str | None:
    """None when SGLang takes the slots of a verify forward from us."""
    from sglang.kernels.ops.speculative.cache_locs import _get_oot_speculative_cache_locs_fn

    from sglang_glm.compat.host.cache_locs import assign_extend_cache_locs

    found = _get_oot_speculative_cache_locs_fn()
    return None if found is assign_extend_cache_locs else f"found {found!r}"


def check_spec_sampling() -> str | None:
    """None when EAGLE verifies sampled output with our functions."""
    from sglang.srt.speculative import eagle_utils

    from sglang_glm.compat.host.eagle_utils import SAMPLING

    for (_, name), ours in SAMPLING.items():
        found = getattr(eagle_utils, name)
        if found is not ours:
            return f"{name} is {found!r}"
    return None
