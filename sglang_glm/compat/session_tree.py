"""Requests of a session form a tree; SGLang drops branches of it in ways that end the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.session.session_controller import Session, SessionReqNode


def create_req(
    original: Callable[..., Any], self: Session, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook: a request that replaces all before it empties the session first.

    SGLang's form deletes from the table of requests while it iterates over it.
    """
    params = req.session_params
    if params.replace and params.rid is None and not self.streaming:
        for node in self.req_nodes.values():
            node.abort()
        self.req_nodes.clear()
    return original(self, req, *args, **kwargs)


def clear_node(self: SessionReqNode, req_dict: dict[str, Any]) -> None:
    """BEFORE hook: a request whose id was used again is no longer in the table that it is deleted from."""
    req_dict.setdefault(self.req.rid, self)
