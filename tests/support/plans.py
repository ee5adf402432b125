"""The command lines of `sglang-glm plan` that help and document show, and the parser for them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sglang_glm.cli import plan

_ROOT = Path(__file__).parents[2]


def make_parser() -> argparse.ArgumentParser:
    """`sglang-glm plan` without the rest of `sglang-glm`."""
    parser = argparse.ArgumentParser()
    plan.configure(parser)
    return parser


def _commands(text: str) -> list[str]:
    found: list[str] = re.findall(r"^ *sglang-glm plan (.*)$", text, re.MULTILINE)
    assert len(found) >= 5, "the examples have another form"
    return found


HELP_EXAMPLES = _commands((make_parser().epilog or "").replace("\\\n", " "))
DOCUMENT_EXAMPLES = _commands((_ROOT / "docs" / "planning.md").read_text(encoding="utf-8"))
