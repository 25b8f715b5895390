"""Requests of a session that are sound, but crash SGLang's scheduler."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT


def begin_anew(session: Any, req: Any, *_: Any, **__: Any) -> None:
    """BEFORE `Session.create_req`: forget the history if `replace` names no request.

    SGLang's own loop removes entries from the dictionary that it walks through.
    """
    asked = req.session_params
    if asked.replace and asked.rid is None and not session.streaming:
        for node in [node for node in session.req_nodes.values() if node.parent is None]:
            node.clear(session.req_nodes)


def clear(original: Any, node: Any, nodes: dict[str, Any]) -> None:
    """AROUND `SessionReqNode.clear`: two requests of a session may have the same id."""
    for child in node.children:
        child.clear(nodes)
    if node.req.finished_reason is None:
        node.req.to_finish = FINISH_ABORT()
    nodes.pop(node.req.rid, None)
    return None
