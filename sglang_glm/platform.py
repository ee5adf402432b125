"""Entry point `sglang.srt.platforms`: the CPU as a platform of its own, where nothing faster is.

SGLang has an in-tree CPU engine too; it needs AMX kernels that its PyPI wheel does not carry and
knows no sparse attention. `SGLANG_USE_CPU_ENGINE=1` still selects it.
"""

import os

HOST_PLATFORM = "sglang_glm.compat.host.platform:HostSRTPlatform"


def activate() -> str | None:
    """The class that SGLang should use as its platform, or None to leave the choice to SGLang."""
    from sglang_glm import envs

    if not envs.ENABLE.get() or envs.HOST_PLATFORM.get() == "off" or has_accelerator():
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return HOST_PLATFORM


def has_accelerator() -> bool:
    """Whether torch sees any device that SGLang has a platform for."""
    import torch

    accelerators = (
        torch.cuda,
        torch.xpu,
        torch.mps,
        getattr(torch, "npu", None),
        getattr(torch, "musa", None),
    )
    return any(module is not None and module.is_available() for module in accelerators)


def has_cuda() -> bool:
    """Whether an NVIDIA GPU serves; torch calls AMD's devices `cuda` too."""
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()
