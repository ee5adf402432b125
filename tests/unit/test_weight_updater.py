"""Memory is released and resumed once, without a CUDA device to wait for.

test_waits_for_the_cpu       and for nothing that torch was built with
test_only_what_changes       tags that are released already, or not at all, are left alone
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

from sglang_glm.compat.host.weight_updater import (
    release_memory_occupation,
    resume_memory_occupation,
)

MANAGER: Any = SimpleNamespace(offload_tags=set())


def test_waits_for_the_cpu() -> None:
    stock = torch.get_device_module
    asked = []

    def original(manager: Any, request: Any) -> str:
        torch.get_device_module().synchronize()
        asked.append((torch.get_device_module(), manager))
        if request.fails:
            raise RuntimeError("fails")
        return "released"

    request = SimpleNamespace(tags=None, fails=False)
    assert release_memory_occupation(original, MANAGER, request) == "released"
    with pytest.raises(RuntimeError, match="fails"):
        release_memory_occupation(original, MANAGER, SimpleNamespace(tags=None, fails=True))
    assert asked == [(torch.cpu, MANAGER)] * 2
    assert torch.get_device_module is stock


@pytest.mark.parametrize(
    ("released", "asked", "to_release", "to_resume"),
    [
        ([], None, GPU_MEMORY_ALL_TYPES, []),
        (GPU_MEMORY_ALL_TYPES, [], [], GPU_MEMORY_ALL_TYPES),
        (["weights"], None, ["kv_cache", "cuda_graph"], ["weights"]),
        (["weights"], ["kv_cache", "weights", "kv_cache"], ["kv_cache"], ["weights"]),
        (["weights"], ["weights", "weights"], [], ["weights"]),
    ],
)
def test_only_what_changes(
    released: list[str], asked: list[str] | None, to_release: list[str], to_resume: list[str]
) -> None:
    for hook, changed in (
        (release_memory_occupation, to_release),
        (resume_memory_occupation, to_resume),
    ):
        seen: list[str] = []

        def original(manager: Any, request: Any, seen: list[str] = seen) -> None:
            seen += request.tags

        manager = SimpleNamespace(offload_tags=set(released))
        hook(original, manager, SimpleNamespace(tags=asked))
        assert seen == changed
