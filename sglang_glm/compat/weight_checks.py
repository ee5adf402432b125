"""Weight updates that cannot be done are answered with 400: SGLang raises on them in a scheduler, which ends it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.managers.io_struct import (
    InitWeightsSendGroupForRemoteInstanceReqOutput,
    InitWeightsUpdateGroupReqOutput,
    SendWeightsToRemoteInstanceReqOutput,
    UpdateWeightsFromTensorReqOutput,
)
from transformers import PretrainedConfig

from sglang_glm.checkpoint.files import check_files
from sglang_glm.config import GlmDsaConfig, is_glm_moe_dsa

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def update_weights_from_disk(
    original: Callable[..., Awaitable[tuple[bool, str, int]]],
    self: Any,
    obj: Any,
    request: Any = None,
) -> tuple[bool, str, int]:
    """AROUND hook of the HTTP server's: weights that cannot be loaded are refused before any is replaced.

    SGLang would go back to the weights before, but reads them from where it read the wrong ones.

    Returns:
        As SGLang: whether the weights are updated, what to say (SGLang answers failures with 400), and 0.
    """
    if is_glm_moe_dsa(self.model_config.hf_config.architectures):
        try:
            check_weight_update(obj.model_path, obj.load_format, served=self.model_path)
        except ValueError as error:
            return False, str(error), 0
    return await original(self, obj, request)


def check_weight_update(model_path: str, load_format: str | None, *, served: str) -> None:
    """Refuse a checkpoint that does not fit the model that is being served.

    Args:
        model_path: Where the new weights lie. A name that is no folder is left to SGLang.
        load_format: None for the server's own.
        served: Where the present ones came from.

    Raises:
        ValueError: names the format, the file or the field.
    """
    formats = [one.value for one in LoadFormat]
    if load_format is not None and load_format.lower() not in formats:
        raise ValueError(f"load_format is {load_format!r}, expected one of {', '.join(formats)}")
    folder = Path(model_path)
    if not folder.is_dir():
        return
    check_files(folder)
    try:
        new, old = (
            dataclasses.asdict(GlmDsaConfig.from_hf(PretrainedConfig.get_config_dict(path)[0]))
            for path in (model_path, served)
        )
    except OSError as error:
        raise ValueError(f"config.json of {model_path} cannot be read: {error}") from None
    for field, value in new.items():
        if value != old[field]:
            raise ValueError(
                f"{field} of {model_path} is {value}, expected {old[field]} as in the model that is served; "
                "start another server for it"
            )


def update_weights_from_tensor(
    original: Callable[[Any, Any], UpdateWeightsFromTensorReqOutput], self: Any, recv_req: Any
) -> UpdateWeightsFromTensorReqOutput:
    """AROUND hook of a scheduler's: what cannot be unpacked or loaded is an answer."""
    try:
        return original(self, recv_req)
    except Exception as error:
        # SGLang's form ends in this barrier; ranks that could load wait there.
        torch.distributed.barrier(group=self.tp_cpu_group)
        return UpdateWeightsFromTensorReqOutput(
            success=False,
            message=f"the tensors were not loaded, or not all of them: {_words(error)}",
        )


def init_weights_update_group(
    original: Callable[[Any, Any], InitWeightsUpdateGroupReqOutput], self: Any, recv_req: Any
) -> InitWeightsUpdateGroupReqOutput:
    """AROUND hook of a scheduler's: a group that cannot be formed is an answer."""
    try:
        return original(self, recv_req)
    except Exception as error:
        return InitWeightsUpdateGroupReqOutput(success=False, message=_words(error))


def init_weights_send_group(
    original: Callable[[Any, Any], InitWeightsSendGroupForRemoteInstanceReqOutput],
    self: Any,
    recv_req: Any,
) -> InitWeightsSendGroupForRemoteInstanceReqOutput:
    """AROUND hook of a scheduler's: as `init_weights_update_group`, towards another server."""
    try:
        return original(self, recv_req)
    except Exception as error:
        return InitWeightsSendGroupForRemoteInstanceReqOutput(success=False, message=_words(error))


def send_weights(
    original: Callable[[Any, Any], SendWeightsToRemoteInstanceReqOutput], self: Any, recv_req: Any
) -> SendWeightsToRemoteInstanceReqOutput:
    """AROUND hook of a scheduler's: a group that was never formed is an answer."""
    try:
        return original(self, recv_req)
    except Exception as error:
        return SendWeightsToRemoteInstanceReqOutput(success=False, message=_words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
