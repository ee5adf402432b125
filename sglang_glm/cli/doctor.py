"""`sglang-glm doctor`: is this machine set up to serve GLM, and with what."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

_EXAMPLES = """\
examples:
  sglang-glm doctor
  sglang-glm doctor --kv-cache-dtype float8_e4m3fn
  sglang-glm doctor --json | python -m json.tool
  what a command line of the server would be served with here:
    sglang-glm doctor -- --model-path checkpoints/tiny-glm-dsa --kv-cache-dtype fp8_e4m3
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Check versions, accelerators, every place where SGLang is entered, the DSA backends that "
        "can serve here, and one small batch. The exit status is 1 when something failed."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("--json", action="store_true", help="print plain data")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("float32", "bfloat16", "float8_e4m3fn"),
        default="bfloat16",
        help="cache to judge the backends for (default bfloat16)",
    )
    parser.add_argument(
        "server_arguments",
        nargs="*",
        metavar="-- SERVER ARGUMENTS",
        help="of sglang.launch_server: resolve them and name the backends that would serve",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 1 when something failed."""
    print("  loading SGLang and what it brings, some seconds", file=sys.stderr, flush=True)
    from sglang_glm.diagnosis.backends import check_backends, check_cuda_choice, self_check
    from sglang_glm.diagnosis.environment import check_accelerators, check_versions
    from sglang_glm.diagnosis.findings import Diagnosis
    from sglang_glm.diagnosis.seams import check_seams
    from sglang_glm.diagnosis.server import check_command

    diagnosis = Diagnosis(
        [
            *check_versions(),
            *check_accelerators(),
            *check_seams(),
            *check_backends(arguments.kv_cache_dtype),
            *check_cuda_choice(arguments.kv_cache_dtype),
            *check_command(arguments.server_arguments),
            *self_check(),
        ]
    )
    print(json.dumps(diagnosis.to_dict(), indent=2) if arguments.json else diagnosis.render())
    return 0 if diagnosis.healthy else 1
