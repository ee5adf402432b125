"""Requests to the control endpoints that would end a scheduler are answered with 400 instead."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import ProfileReqOutput, ProfileReqType
from sglang.srt.runtime_context import get_exec

from sglang_glm.platform import has_cuda

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sglang.srt.managers.io_struct import ProfileReq

MAX_NAME = 100
"""Bytes of each of the two names that a trace's file name is made of; a file name has at most 255."""

LOG_REQUESTS_LEVELS = range(4)

_NEEDS_CUDA = ("MEM", "CUDA_PROFILER")


def record_experts(original: Callable[[Any], Awaitable[None]], self: Any) -> Awaitable[None]:
    """AROUND hook of the three expert-distribution endpoints: there is a recorder only with its flag.

    Raises:
        HTTPException: 400, names the flag.
    """
    if get_exec().moe.expert_distribution_recorder_mode is None:
        raise HTTPException(
            400,
            "no expert distribution is recorded: --expert-distribution-recorder-mode is not set; "
            "start the server with it (stat counts tokens by expert)",
        )
    return original(self)


async def execute_profile(
    original: Callable[[Any, ProfileReq], Awaitable[ProfileReqOutput]], self: Any, req: ProfileReq
) -> ProfileReqOutput:
    """AROUND hook of starting and stopping a profile in the HTTP server.

    Raises:
        HTTPException: 400, with what is wrong with the request, or what a scheduler answered.
    """
    try:
        if req.req_type == ProfileReqType.START_PROFILE:
            check_profile(req)
        return await original(self, req)
    except (ValueError, RuntimeError) as error:
        raise HTTPException(400, str(error)) from None


def check_profile(req: ProfileReq) -> None:
    """Refuse what a scheduler would raise on while it serves, at the first step or at the last.

    Args:
        req: The request. Its folder is made.

    Raises:
        ValueError: names the field, its value and what is expected.
    """
    activities = req.activities or []
    for name in _NEEDS_CUDA:
        if name in activities and not has_cuda():
            raise ValueError(
                f"activities has {name!r}, which needs an NVIDIA GPU; choose 'CPU', or leave activities out"
            )
    if "RPD" in activities and importlib.util.find_spec("rpdTracerControl") is None:
        raise ValueError(
            "activities has 'RPD', and rpdTracerControl is not installed; leave it out"
        )
    if req.profile_by_stage and not req.num_steps:
        raise ValueError(
            f"profile_by_stage with num_steps {req.num_steps}: a stage is profiled for a number of "
            "steps; give num_steps"
        )
    for field, name in (("profile_prefix", req.profile_prefix), ("profile_id", req.profile_id)):
        if name and ("/" in name or "\0" in name or len(name.encode()) > MAX_NAME):
            raise ValueError(
                f"{field} is {name[:MAX_NAME]!r}, expected a part of a file name: no '/', at most "
                f"{MAX_NAME} bytes"
            )
    folder = Path(req.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp"))
    try:
        folder.expanduser().mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"output_dir is {str(folder)!r}, which cannot be made: {error}") from None
    if not os.access(folder.expanduser(), os.W_OK):
        raise ValueError(f"output_dir is {str(folder)!r}, expected a folder that can be written to")


def profile(
    original: Callable[[Any, ProfileReq], ProfileReqOutput], self: Any, recv_req: ProfileReq
) -> ProfileReqOutput:
    """AROUND hook of a scheduler's profiler: one profile at a time.

    SGLang sees that one is running, and starts the other nevertheless; the first is lost, and the
    profiler below torch ends the process at the next start.
    """
    if recv_req.req_type == ProfileReqType.START_PROFILE and getattr(
        self, "profile_in_progress", False
    ):
        return ProfileReqOutput(
            success=False, message="a profile is being taken; call /stop_profile first"
        )
    return original(self, recv_req)


def release_memory_occupation(
    original: Callable[..., Awaitable[None]], self: Any, obj: Any, request: Any = None
) -> Awaitable[None]:
    """AROUND hook of the HTTP server's: a scheduler asserts that it is idle.

    A server that is paused may hold requests that it has retracted.

    Raises:
        ValueError: requests are being served; SGLang answers it with 400.
    """
    if self.rid_to_state and not self.is_pause:
        raise ValueError(
            f"{len(self.rid_to_state)} requests are being served, expected none; wait for them, or call "
            "/pause_generation with mode retract"
        )
    return original(self, obj, request)


def configure_logging(original: Callable[[Any, Any], None], self: Any, obj: Any) -> None:
    """AROUND hook of the HTTP server's: SGLang keeps a level that it cannot log at, and fails from then on.

    Raises:
        HTTPException: 400, names the field and what is expected.
    """
    level, name = obj.log_requests_level, obj.log_level
    if level is not None and level not in LOG_REQUESTS_LEVELS:
        raise HTTPException(400, f"log_requests_level is {level}, expected 0 to 3")
    names = logging.getLevelNamesMapping()
    if name is not None and name.upper() not in names:
        raise HTTPException(
            400, f"log_level is {name!r}, expected one of {', '.join(names).lower()}"
        )
    original(self, obj)
