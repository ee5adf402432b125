"""Our backend names among the choices of SGLang's flags."""

import argparse
from typing import Any

from sglang_glm.attention import registry
from sglang_glm.parallel.names import ALL_TO_ALL

_FLAGS: dict[str, registry.Phase] = {
    "dsa_prefill_backend": "prefill",
    "dsa_decode_backend": "decode",
    "dsa_topk_backend": "topk",
    "speculative_dsa_topk_backend": "topk",
}

_ALL_TO_ALL_FLAGS = ("moe_a2a_backend", "speculative_moe_a2a_backend")


def add_choices(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER hook of `ServerArgs.add_cli_args`: extend each flag's choices."""
    for action in parser._actions:
        if action.dest in _FLAGS:
            _extend(action, registry.names(_FLAGS[action.dest]))
        elif action.dest in _ALL_TO_ALL_FLAGS:
            _extend(action, [ALL_TO_ALL])


def _extend(action: argparse.Action, names: list[str]) -> None:
    stock = list(action.choices or ())
    action.choices = [*stock, *(name for name in names if name not in stock)]
