"""Probes of seams that are no hooks: what SGLang would really use."""


def check_host_pool() -> str | None:
    """None when SGLang would build our KV pool for sparse attention."""
    from sglang.srt.platforms import current_platform

    from sglang_glm.memory.kv_pool import GlmDsaTokenToKVPool

    found = current_platform.get_kv_pool_cls(kind="dsa")
    return None if found is GlmDsaTokenToKVPool else f"current_platform builds {found!r}"


def check_resolution_hook(step: str, implementation: object) -> str | None:
    """None when `step` of the argument resolution runs our wrapper."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return None if implementation in _HOOKS.get(step, ()) else "our wrapper is not registered"


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
