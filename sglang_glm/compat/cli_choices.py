"""Our backend names among the choices of SGLang's DSA flags."""

import argparse
from typing import Any

from sglang_glm.attention import registry

_FLAGS: dict[str, registry.Phase] = {
    "dsa_prefill_backend": "prefill",
    "dsa_decode_backend": "decode",
    "dsa_topk_backend": "topk",
    "speculative_dsa_topk_backend": "topk",
}


def add_dsa_choices(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER hook of `ServerArgs.add_cli_args`: extend each flag's choices."""
    for action in parser._actions:
        if action.dest in _FLAGS:
            ours = registry.names(_FLAGS[action.dest])
            action.choices = [
                *(action.choices or ()),
                *(name for name in ours if name not in (action.choices or ())),
            ]
