"""Sessions whose requests replace each other, or come twice under one id.

test_replace_all       a request that replaces all before it, on sessions of none, one and three
test_replace_a_branch  the branch goes, though one id in it was used again
"""

import types
from array import array
from typing import Any

import pytest
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.session import session_controller
from sglang.srt.session.session_controller import Session, SessionReqNode

from sglang_glm.compat.session_tree import clear_node, create_req


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang applies the ledger's rows."""
    for owner, name, hook, kind in (
        (Session, "create_req", create_req, HookType.AROUND),
        (SessionReqNode, "clear", clear_node, HookType.BEFORE),
    ):
        monkeypatch.setattr(owner, name, _wrap_fn(getattr(owner, name), hook, kind))
    monkeypatch.setattr(session_controller, "log_info_on_rank0", lambda *_: None)


def make(rid: str, **_: object) -> types.SimpleNamespace:
    """A finished request that said 9."""
    return types.SimpleNamespace(
        rid=rid,
        finished_reason="length",
        finished=lambda: True,
        to_finish=None,
        origin_input_ids=array("q", [5]),
        origin_input_ids_unpadded=array("q", [5]),
        output_ids=array("q", [9]),
        sampling_params=types.SimpleNamespace(max_new_tokens=1),
        multimodal_inputs=None,
        inherit_mm_token_counts=lambda parent: None,
        set_finish_with_abort=lambda message: pytest.fail(message),
    )


def send(session: Session, request_id: str, **params: Any) -> None:
    fields: dict[str, Any] = dict.fromkeys(TokenizedGenerateReqInput.__struct_fields__)
    fields |= {"rid": request_id, "input_ids": array("q", [7])}
    fields |= {"session_params": SessionParams(id="s", **params)}
    session.create_req(types.SimpleNamespace(**fields), None, 896, req_factory=make)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [[], ["a"], ["a", "b", "c"]])
def test_replace_all(before: list[str]) -> None:
    session = Session(100, "s")
    for rid, parent in zip(before, [None, *before], strict=False):
        send(session, rid, rid=parent)
    send(session, "new", replace=True)
    assert list(session.req_nodes) == ["new"]


def test_replace_a_branch() -> None:
    session = Session(100, "s")
    send(session, "root")
    for rid in ("a", "b", "b"):
        send(session, rid, rid="root")
    send(session, "new", rid="root", replace=True)
    assert sorted(session.req_nodes) == ["new", "root"]
