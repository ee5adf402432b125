"""What tests/gpu/serving measures of prefill, on a small server.

test_kernel_times    a trace is summed by kernel, and only kernels count
test_profile         every chunk of a prompt is timed once, and the last one traced
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu.serving import prefill
from tests.support.parity import prompt
from tests.support.specs import TRUTH_8

if TYPE_CHECKING:
    import pytest

    from tests.support.server import Server

SERVER = TRUTH_8


def test_kernel_times() -> None:
    events = [
        {"cat": "kernel", "name": "topk", "dur": 1500.0},
        {"cat": "kernel", "name": "score", "dur": 400.0},
        {"cat": "kernel", "name": "topk", "dur": 500.0},
        {"cat": "cpu_op", "name": "aten::add", "dur": 9000.0},
        {"ph": "M", "name": "process_name"},
    ]
    got = prefill.kernel_times(events, ("kernel",))
    assert got == {"busy_ms": 2.4, "kernels_ms": {"topk": 2.0, "score": 0.4}}


def test_profile(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "prompt", lambda length, seed: prompt(server, length, seed))
    got = prefill.profile(server, context=600, chunk=128, activity="CPU")
    assert list(got["chunk_ms"]) == [0, 128, 256, 384]
    assert all(ms > 0 for ms in got["chunk_ms"].values())
    traced = got["traced"]
    assert traced["history"] == 384 and traced["elapsed_ms"] > 0
    assert traced["busy_ms"] > 0 and len(traced["kernels_ms"]) == prefill.TOLD
