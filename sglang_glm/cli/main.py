"""``sglang-glm``: one module per subcommand, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "checkpoint": "write a small random checkpoint to serve and test with",
    "doctor": "check that this machine can serve, and with which backends",
    "plan": "memory, traffic, time and launch flags of a model on given GPUs",
    "verify": "compare a server or a checkpoint with reference logits",
}
"""Subcommand to its line of help. Its module, ``sglang_glm.cli.<name>``, has
``configure(parser)``, which may set ``parser.description`` and adds arguments, and
``run(arguments) -> int``, which returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments without the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit status: 0, or 1 after an error that was explained on standard error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="sglang-glm", description="Tools around serving GLM-5.x with SGLang."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == wanted:
            importlib.import_module(f"sglang_glm.cli.{name}").configure(subparser)
    parsed = parser.parse_args(arguments)
    command = importlib.import_module(f"sglang_glm.cli.{parsed.command}")
    try:
        return int(command.run(parsed))
    except (ValueError, RuntimeError) as error:
        print(f"sglang-glm {parsed.command}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
