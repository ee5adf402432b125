"""Paths that SGLang keeps to its own platforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_glm.compat.host.kv_shard_hook import FLAG

if TYPE_CHECKING:
    from collections.abc import Callable


def reject_out_of_tree_path(
    original: Callable[..., None], platform: Any, *, subsystem: str
) -> None:
    """AROUND hook: let a sharded cache be built, since its pool on the CPU is ours."""
    if FLAG not in subsystem:
        original(platform, subsystem=subsystem)
