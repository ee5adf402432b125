"""Memory is released without a CUDA device to wait for."""

import pytest
import torch

from sglang_glm.compat.host.weight_updater import release_memory_occupation


def test_waits_for_the_cpu() -> None:
    stock = torch.get_device_module
    asked = []

    def original(manager: str, request: str) -> str:
        torch.get_device_module().synchronize()
        asked.append((torch.get_device_module(), manager, request))
        if request == "fails":
            raise RuntimeError(request)
        return "released"

    assert release_memory_occupation(original, "manager", "request") == "released"
    with pytest.raises(RuntimeError, match="fails"):
        release_memory_occupation(original, "manager", "fails")
    assert [module for module, *_ in asked] == [torch.cpu, torch.cpu]
    assert torch.get_device_module is stock
