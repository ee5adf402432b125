"""Requests to the control endpoints that would end a scheduler.

test_no_recorder          the three expert-distribution endpoints name the flag; with it they go on
test_profiles_refused     each field that a scheduler would raise on, before and after a step
test_profiles_taken       what is fine reaches SGLang, and its folder is made
test_answers              what a scheduler refuses is a 400 with its words; stopping is not checked
test_one_profile          a second start is refused, a stop and a later start are not
test_logging              levels that do not exist
test_busy                 memory of a server with requests is not released unless it is paused
"""

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import (
    ConfigureLoggingReq,
    ProfileReq,
    ProfileReqOutput,
    ProfileReqType,
)

from sglang_glm.compat import control_checks
from sglang_glm.compat.control_checks import check_profile

STOP = ProfileReqType.STOP_PROFILE


@pytest.mark.parametrize("mode", [None, "stat"])
def test_no_recorder(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = types.SimpleNamespace(expert_distribution_recorder_mode=mode)
    monkeypatch.setattr(control_checks, "get_exec", lambda: types.SimpleNamespace(moe=moe))

    async def original(manager: str) -> str:
        return manager

    if mode is None:
        with pytest.raises(HTTPException) as refused:
            control_checks.record_experts(original, "manager")  # type: ignore[arg-type]
        assert refused.value.status_code == 400
        assert "--expert-distribution-recorder-mode is not set" in refused.value.detail
    else:
        answer = control_checks.record_experts(original, "manager")  # type: ignore[arg-type]
        assert asyncio.run(answer) == "manager"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"activities": ["MEM"]}, "activities has 'MEM', which needs an NVIDIA GPU"),
        ({"activities": ["CPU", "CUDA_PROFILER"]}, "activities has 'CUDA_PROFILER'"),
        ({"activities": ["RPD"]}, "rpdTracerControl is not installed"),
        ({"profile_by_stage": True}, "profile_by_stage with num_steps None"),
        ({"profile_by_stage": True, "num_steps": 0}, "give num_steps"),
        ({"profile_prefix": "a/b"}, "profile_prefix is 'a/b', expected a part of a file name"),
        ({"profile_id": "a\0"}, "profile_id is"),
        ({"profile_prefix": "x" * 101}, "at most 100 bytes"),
        ({"output_dir": "/proc/traces"}, "output_dir is '/proc/traces', which cannot be made"),
        ({"output_dir": __file__}, "which cannot be made"),
        ({"output_dir": "~nobody-by-this-name/x"}, "which cannot be made"),
        ({"output_dir": "a\0b"}, "which cannot be made"),
    ],
)
def test_profiles_refused(
    fields: dict, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_checks, "has_cuda", lambda: False)
    with pytest.raises(ValueError, match=r"^\w+ ") as refused:
        check_profile(ProfileReq(**{"output_dir": str(tmp_path), **fields}))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activities": ["CPU"], "num_steps": 2, "profile_by_stage": True},
        {"activities": ["CPU", "GPU"], "profile_prefix": "x" * 100, "profile_id": "1"},
    ],
)
def test_profiles_taken(fields: dict, tmp_path: Path) -> None:
    check_profile(ProfileReq(output_dir=str(tmp_path / "new" / "folder"), **fields))
    assert (tmp_path / "new" / "folder").is_dir()


def test_answers(tmp_path: Path) -> None:
    async def original(manager: Any, req: ProfileReq) -> ProfileReqOutput:
        if manager == "refuses":
            raise RuntimeError("not in progress")
        return ProfileReqOutput(success=True, message="")

    def send(manager: str, **fields: Any) -> ProfileReqOutput:
        return asyncio.run(control_checks.execute_profile(original, manager, ProfileReq(**fields)))

    assert send("takes", output_dir=str(tmp_path)).success
    assert send("takes", req_type=STOP, activities=["MEM"], output_dir="/proc/x").success
    for manager, fields, said in (
        ("refuses", {"req_type": STOP}, "not in progress"),
        ("takes", {"output_dir": "/proc/x"}, "output_dir"),
    ):
        with pytest.raises(HTTPException, match=said) as refused:
            send(manager, **fields)  # type: ignore[arg-type]
        assert refused.value.status_code == 400


def test_one_profile() -> None:
    manager = types.SimpleNamespace(profile_in_progress=False)

    def original(self: Any, req: ProfileReq) -> ProfileReqOutput:
        self.profile_in_progress = req.req_type != STOP
        return ProfileReqOutput(success=True, message="")

    start, stop = ProfileReq(), ProfileReq(req_type=STOP)
    assert control_checks.profile(original, manager, start).success
    refused = control_checks.profile(original, manager, start)
    assert not refused.success and "/stop_profile first" in refused.message
    assert control_checks.profile(original, manager, stop).success
    assert control_checks.profile(original, manager, start).success


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"log_requests_level": 99}, "log_requests_level is 99, expected 0 to 3"),
        ({"log_requests_level": -1}, "log_requests_level is -1"),
        ({"log_level": "bogus"}, "log_level is 'bogus', expected one of critical, "),
        ({"log_requests_level": 3, "log_level": "Info"}, None),
        ({}, None),
    ],
)
def test_logging(fields: dict, said: str | None) -> None:
    asked: list[ConfigureLoggingReq] = []

    def original(manager: Any, obj: ConfigureLoggingReq) -> None:
        asked.append(obj)

    obj = ConfigureLoggingReq(**fields)
    if said is None:
        control_checks.configure_logging(original, None, obj)
    else:
        with pytest.raises(HTTPException, match=said) as refused:
            control_checks.configure_logging(original, None, obj)
        assert refused.value.status_code == 400
    assert asked == [obj] * (said is None)


def test_busy() -> None:
    async def original(manager: Any, obj: str, request: Any) -> None:
        asked.append(obj)

    asked: list[str] = []
    for held, paused, released in (({}, False, 1), ({"a": 1}, True, 1), ({"a": 1}, False, 0)):
        manager = types.SimpleNamespace(rid_to_state=held, is_pause=paused)
        asked.clear()
        if released:
            asyncio.run(control_checks.release_memory_occupation(original, manager, "tags"))  # type: ignore[arg-type]
        else:
            with pytest.raises(ValueError, match="1 requests are being served, expected none"):
                control_checks.release_memory_occupation(original, manager, "tags")
        assert len(asked) == released
