"""Puts the functions that verify sampled output where SGLang has None."""

import importlib
import sys
from collections.abc import Callable

from sglang_glm.compat.host.renorm import top_k_renorm_prob, top_p_renorm_prob
from sglang_glm.compat.host.verify_sampling import tree_speculative_sampling_target_only

_RENORM = "sglang.kernels.ops.sampling.renorm"
_VERIFY = "sglang.kernels.ops.speculative.verify_sampling"
_EAGLE_UTILS = "sglang.srt.speculative.eagle_utils"

#: Module and name that hold None off CUDA, and what belongs there.
SAMPLING: dict[tuple[str, str], Callable[..., object]] = {
    (_RENORM, "top_k_renorm_prob"): top_k_renorm_prob,
    (_RENORM, "top_p_renorm_prob"): top_p_renorm_prob,
    (_VERIFY, "tree_speculative_sampling_target_only"): tree_speculative_sampling_target_only,
}


def supply_sampling() -> None:
    """Fill the names in, also in `eagle_utils` where that has copied them already."""
    for (module_name, name), implementation in SAMPLING.items():
        setattr(importlib.import_module(module_name), name, implementation)
        if _EAGLE_UTILS in sys.modules:
            setattr(sys.modules[_EAGLE_UTILS], name, implementation)
