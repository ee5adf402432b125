"""What SGLang and this package make of a command line on H200s, resolved on a machine without any.

Argument resolution asks CUDA for its devices, and imports kernels that need a driver. Both are
pretended in a process of its own: nothing is computed there. `B200` in place of `H200` pretends those.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.resolve import outcomes

_PRETEND = """
import importlib.abc, importlib.machinery, json, os, sys, types
from unittest.mock import MagicMock
import torch

class Device:
    multi_processor_count, minor, name = 132, 0, f"NVIDIA {os.environ['PRETENDED_GPU']}"
    major, total_memory = {"H200": (9, 150_754_820_096), "B200": (10, 191_500_000_000)}[name[7:]]

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *_: (Device.major, 0)
torch.cuda.get_device_name = lambda *_: Device.name
torch.cuda.get_device_properties = lambda *_: Device
torch.cuda.mem_get_info = lambda *_: (150_000_000_000, Device.total_memory)

class Absent(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Absent(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
"""

_RESOLVE = """
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs
from sglang.srt.server_args import prepare_server_args
from sglang_glm.compat import deepep_budget, refusals

outcomes = []
for case in json.load(sys.stdin):
    os.environ.update(case["env"])
    try:
        server_args = prepare_server_args(case["argv"])
        server_args.resolve_once()
        view = resolving_view(server_args)
        refusals.refuse_unserved(server_args, lambda _: None)
        deepep_budget.check_budget(view, envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get())
        outcomes.append({"resolved": {name: getattr(view, name) for name in case["read"]}})
    except SystemExit as error:
        outcomes.append({"rejected": f"argparse exit {error.code}"})
    except Exception as error:
        outcomes.append({"refused": f"{type(error).__name__}: {error}"})
    for name in case["env"]:
        del os.environ[name]
print("OUTCOMES" + json.dumps(outcomes))
"""


def resolve_on_h200(
    cases: list[tuple[dict[str, str], list[str], list[str]]], gpu: str = "H200"
) -> list[dict]:
    """Resolve each `(environment, argv, fields to read)`, all in one process.

    The plugin is off, since it would enter modules that need a driver; its refusals are called.

    Returns:
        As `resolve`.
    """
    payload = [{"env": env, "argv": argv, "read": read} for env, argv, read in cases]
    return outcomes(_PRETEND + _RESOLVE, payload, SGLANG_GLM_ENABLE="0", PRETENDED_GPU=gpu)


def command_on_h200(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `sglang-glm WORDS` where eight H200s are pretended; the plugin is on."""
    run = f"from sglang_glm.cli.main import main; raise SystemExit(main({list(words)!r}))"
    return subprocess.run(
        [sys.executable, "-c", f"{_PRETEND}\n{run}"],
        env={**os.environ, "SGLANG_GLM_ENABLE": "1", "PRETENDED_GPU": "H200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
