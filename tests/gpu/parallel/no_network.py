"""Plugin of a server whose ranks NVLink connects and no network card: DeepEP's decode runs there too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tests.gpu.parallel import queue_pairs

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def get_buffer(
    original: Callable[..., Any], cls: type, group: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of `DeepEPBuffer.get_deepep_buffer`: satisfy the kernels' check when it is built."""
    is_new = cls._state().buffer is None
    buffer = original(cls, group, *args, **kwargs)
    if is_new and buffer.low_latency_mode:
        pairs, cards = queue_pairs.read()
        logger.info("DeepEP: %d queue pairs a peer, %d network cards", pairs, cards)
        if cards <= 0:
            queue_pairs.set_without_cards(cls._state().num_experts // group.size())
    return buffer


def register() -> None:
    """Entry point of a plugin that `serve.py` writes beside the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPBuffer.get_deepep_buffer",
        get_buffer,
        HookType.AROUND,
    )
