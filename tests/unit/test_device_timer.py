"""SGLang's timer of forward passes, on a machine without accelerator events."""

import pytest
from sglang.srt.utils import device_timer

from sglang_glm.compat.host.device_timer import HostInterval


def test_a_forward_is_reported_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timer, "_TimingInterval", HostInterval)
    reported: list[dict] = []
    timer = device_timer.DeviceTimer(reporter=lambda **values: reported.append(values))
    with device_timer.device_timer_ctx(timer, "decode"):
        assert timer.is_active() and not reported
        sum(range(10_000))
    assert not timer.is_active()
    assert [values["category"] for values in reported] == ["decode"]
    assert 0 < reported[0]["t"] < 60


def test_a_gap_is_reported_between_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timer, "_TimingInterval", HostInterval)
    reported: list[dict] = []
    timer = device_timer.GapTimer(lambda **values: reported.append(values))
    for category in ("extend", "decode"):
        with timer.wrap({"category": category}):
            assert len(reported) == (category == "decode")
    assert reported[0]["t"] > 0


def test_a_running_interval_has_no_length() -> None:
    with pytest.raises(RuntimeError, match="call end"):
        HostInterval.create().elapsed_time()
