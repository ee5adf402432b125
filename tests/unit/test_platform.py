"""The CPU platform answers whatever SGLang asks a platform.

test_nothing_unanswered   every method that SGLang leaves to a platform is ours
test_profiler             what `/start_profile` passes on to torch
"""

import ast
import inspect
import textwrap

import torch
from sglang.srt.platforms.interface import SRTPlatform

from sglang_glm.compat.host.platform import HostSRTPlatform


def raises_not_implemented(function: object) -> bool:
    """Whether the body's last statement is `raise NotImplementedError`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    last = tree.body[0].body[-1]  # type: ignore[attr-defined]
    return isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last)


def test_nothing_unanswered() -> None:
    left_open = [
        name
        for name, function in inspect.getmembers(SRTPlatform, inspect.isfunction)
        if raises_not_implemented(function)
    ]
    assert "get_torch_profiler_activity_str" in left_open
    unanswered = [n for n in left_open if getattr(HostSRTPlatform, n) is getattr(SRTPlatform, n)]
    assert unanswered == []


def test_profiler() -> None:
    platform = HostSRTPlatform.__new__(HostSRTPlatform)  # its constructor sets variables
    name = platform.get_torch_profiler_activity_str()
    assert getattr(torch.profiler.ProfilerActivity, name) is platform.get_torch_profiler_activity()
    with torch.profiler.profile(activities=[platform.get_torch_profiler_activity()]) as profile:
        torch.ones(3) + 1
    assert any("add" in event.key for event in profile.key_averages())
