"""Weight updates that would end a scheduler.

test_weights_that_fit     a copy of what is served, and names that are left to SGLang
test_weights_that_do_not  another format, a shortened file, another shape, no config; SGLang is not asked
test_answers              an error of a scheduler is an answer; tensors wait for the barrier of all ranks
"""

import asyncio
import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_glm.compat import weight_checks
from tests.support.checkpoints import checkpoint

SERVED = checkpoint("--mtp", "--index-topk", "8")


def update(folder: Path, load_format: str | None = None) -> tuple[tuple[bool, str, int], int]:
    """What is answered, and how often SGLang was asked."""
    asked = []

    async def original(manager: Any, obj: Any, request: Any) -> tuple[bool, str, int]:
        asked.append(obj)
        return True, "updated", 0

    manager = types.SimpleNamespace(
        model_path=SERVED,
        model_config=types.SimpleNamespace(
            hf_config=types.SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])
        ),
    )
    obj = types.SimpleNamespace(model_path=str(folder), load_format=load_format)
    answer = weight_checks.update_weights_from_disk(original, manager, obj)
    return asyncio.run(answer), len(asked)


def copy(folder: Path, **changes: Any) -> Path:
    shutil.copytree(SERVED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_weights_that_fit(tmp_path: Path) -> None:
    for folder in (copy(tmp_path / "same"), Path("some/name")):
        assert update(folder) == ((True, "updated", 0), 1)
    assert update(Path(SERVED), "safetensors") == ((True, "updated", 0), 1)


def test_weights_that_do_not(tmp_path: Path) -> None:
    short = copy(tmp_path / "short")
    file = next(short.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    torn = copy(tmp_path / "torn")
    (torn / "config.json").write_text("{")
    for folder, load_format, said in (
        (Path(SERVED), "bogus", "load_format is 'bogus', expected one of auto, "),
        (short, None, f"checkpoint file {file}"),
        (copy(tmp_path / "other", index_topk=16), None, "index_topk of "),
        (tmp_path / "empty", None, "GlmDsaConfig: model_type is None"),
        (torn, None, f"config.json of {torn} cannot be read"),
    ):
        (updated, message, _), asked = update(folder, load_format)
        assert not updated and message.startswith(said) and asked == 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "hook",
    [
        weight_checks.update_weights_from_tensor,
        weight_checks.init_weights_update_group,
        weight_checks.init_weights_send_group,
        weight_checks.send_weights,
    ],
)
def test_answers(hook: Callable[..., Any], fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: barriers.append(group))

    def original(manager: Any, req: str) -> str:
        if fails:
            raise IndexError("no payload of rank 0")
        return req

    answer = hook(original, types.SimpleNamespace(tp_cpu_group="ranks"), "done")
    if fails:
        assert not answer.success and answer.message.endswith("IndexError: no payload of rank 0")
        assert barriers == ["ranks"] * (hook is weight_checks.update_weights_from_tensor)
    else:
        assert answer == "done" and barriers == []
