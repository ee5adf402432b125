"""``sglang-glm``: one module per subcommand, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from sglang_glm import __version__

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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse would print every option before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments without the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit status: 0, or 1 after an error that was explained on standard error. Arguments
        that cannot be parsed end the program with 2.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="sglang-glm", description="Tools around serving GLM-5.x with SGLang.")
    parser.epilog = "Each command has examples: sglang-glm COMMAND --help"
    parser.add_argument("--version", action="version", version=__version__)
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
        status = int(command.run(parsed))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of `sglang-glm … | head` has seen enough; nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"\nsglang-glm {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(
            f"sglang-glm {parsed.command}: error: {_sentence(error, parsed.command)}",
            file=sys.stderr,
        )
        return 1


def _sentence(error: Exception, command: str) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give another path"
    return str(error).removeprefix(f"{command}: ")


if __name__ == "__main__":
    raise SystemExit(main())
