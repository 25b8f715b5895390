"""Compares two answers to one request, field by field."""

from __future__ import annotations

import json
from typing import Any

from test.differential.draw import Request
from test.precision import FP32_KV, Bounds

IGNORED = {  # fields that differ between any two servers
    "id",
    "created",
    "e2e_latency",
    "dp_rank",
    "cached_tokens",
    "weight_version",
    "weight_versions",  # of SGLang 0.5.23
    "prompt_tokens_details",
    "cached_tokens_details",
    "num_retractions",
    "request_received_ts",
    "response_sent_to_client_ts",
    "tool_call_id",
}


def judge(request: Request, ours: Any, theirs: Any, bounds: Bounds) -> str | None:
    """The first difference, or None. An aborted answer must be a beginning of the whole one."""
    if request.abort_after is None:
        return difference(ours, theirs, bounds.at(request.temperature))
    if "error" in ours:  # the abort may find it in the queue, on a slow machine
        return None if "Abort" in json.dumps(ours["error"]) else f"not aborted: {ours['error']}"
    ids, whole = ours.get("output_ids", []), theirs.get("output_ids", [])
    if ids != whole[: len(ids)]:
        return "an aborted answer is no beginning of the whole one"
    kind = (ours["meta_info"]["finish_reason"] or {}).get("type")
    return None if kind == "abort" or len(ids) == len(whole) else f"aborted, but finished by {kind}"


def difference(ours: Any, theirs: Any, bounds: Bounds = FP32_KV, where: str = "") -> str | None:
    """The first place where two answers differ, or None. Numbers may be this far apart."""
    if _is_forbidden(ours) and _is_forbidden(theirs):
        return None
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return _difference_of_fields(ours, _without_others(theirs), bounds, where)
    if isinstance(theirs, list) and isinstance(ours, list):
        if where.endswith("hidden_states[0]"):  # the prompt's, without what each server had cached
            least = min(len(ours), len(theirs))
            ours, theirs = ours[len(ours) - least :], theirs[len(theirs) - least :]
        if len(ours) != len(theirs):
            return f"{where} has {len(ours)} items, not {len(theirs)}"
        if "top_logprobs" in where:
            ours = _in_the_order_of(theirs, ours, bounds.logprob)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if found := difference(a, b, bounds, f"{where}[{i}]"):
                return found
        return None
    if isinstance(theirs, float) and isinstance(ours, int | float):
        allowed = bounds.hidden_state if "hidden_states" in where else bounds.logprob
        return None if abs(ours - theirs) <= allowed else f"{where}: {ours} is not {theirs}"
    return None if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"


def _in_the_order_of(theirs: list[Any], ours: list[Any], bound: float) -> list[Any]:
    """Top logprobs of the same tokens, in their order, if only near-ties are in another one.

    Both lists must have the same logprob at each rank, up to the bound. Each token's logprob is
    compared afterwards.
    """
    ranks = {_token_of(entry): rank for rank, entry in enumerate(theirs)}
    if None in ranks or {_token_of(entry) for entry in ours} != ranks.keys():
        return ours
    if any(abs(_logprob_of(a) - _logprob_of(b)) > bound for a, b in zip(ours, theirs, strict=True)):
        return ours
    return sorted(ours, key=lambda entry: ranks[_token_of(entry)])


def _logprob_of(entry: Any) -> float:
    value: float = entry["logprob"] if isinstance(entry, dict) else entry[0]
    return value


def _token_of(entry: Any) -> Any:
    """The token that an entry of top logprobs names, or None if it is no such entry."""
    match entry:
        case {"token": token, "bytes": data}:
            return token, tuple(data)
        case [float(), int(token), _]:
            return token
    return None


def _difference_of_fields(
    ours: dict[str, Any], theirs: dict[str, Any], bounds: Bounds, where: str
) -> str | None:
    for key in sorted(ours.keys() | theirs.keys()):
        if key in IGNORED or key.startswith("spec_"):
            continue
        if all(_is_forbidden(fields[key]) for fields in (ours, theirs) if key in fields):
            continue
        if (key in ours) != (key in theirs):
            return f"{where}.{key} is in one answer only"
        if found := difference(ours[key], theirs[key], bounds, f"{where}.{key}"):
            return found
    return None


def _without_others(theirs: dict[str, Any]) -> dict[str, Any]:
    """The fields, without the states of the other copies of a prompt (`n`).

    SGLang appends them to the states that the first copy's prefill has computed.
    """
    match theirs:
        case {"hidden_states": [list() as prompt, *rest], "prompt_tokens": n, "cached_tokens": k}:
            return theirs | {"hidden_states": [prompt[: n - k], *rest]}
    return theirs


def _is_forbidden(answer: Any) -> bool:
    """Is this the logprob of a forbidden token? A list of top logprobs names any of them."""
    if isinstance(answer, dict):
        answer = [answer.get("logprob")]
    value = answer[0] if isinstance(answer, list) and answer else answer
    return isinstance(value, float) and value < -1e30
