"""SGLang's recorder of the chosen experts, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def on_hook(original: Callable[..., None], self: Any, hook_name: str, **kwargs: Any) -> None:
    """AROUND hook: count while a record is running, and only then.

    SGLang's form also counts while a CUDA graph is captured, and asks CUDA whether one is: a torch
    that was built with CUDA raises where there is no driver.
    """
    if self._recording:
        original(self, hook_name, **kwargs)
