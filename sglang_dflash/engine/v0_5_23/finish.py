"""The end of a request inside a block, where it would be without speculation.

SGLang gives all tokens of a step to the grammar of their request, and then looks for the end of the
request among them, by one kind of end after another. Without speculation it looks for every end at
each token, before the grammar gets the token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.seam.patched import temporarily

# What the grammar of a request says of the last tokens that it got.
ENDED = "ended"  # by the last one
FOLLOWED = "followed"  # ended by the one before


def accept_by_grammar(original: Callable[..., Any], processor: Any, req: Any, tokens: Any) -> Any:
    """AROUND `_accept_grammar_tokens`: the tokens that a request gets, and what comes after them.

    After the token that ends its grammar, a request gets one more, if that token does not finish
    it (`ignore_eos`). A token that its grammar refuses may finish it, and else aborts it.
    """
    req.dflash_late = None
    run = [tokens] if isinstance(tokens, int) else tokens
    if req.grammar.is_terminated():
        return run[:1]
    taken = original(processor, req, run)
    if req.grammar.is_terminated():
        req.dflash_late = ENDED if len(taken) == len(run) else FOLLOWED
        taken = run[: len(taken) + 1]
    elif len(taken) < len(run) and run is tokens:  # not after a prefill
        req.dflash_late, req.to_finish = req.to_finish, None
        taken = run[: len(taken) + 1]
    # Without speculation SGLang does so after each token that does not finish the request. One of
    # llguidance masks again then (`ignore_eos`).
    req.grammar.finished = False
    return taken


def states_up_to_the_end(
    original: Callable[..., None], *, req: Any, hidden_states: Any, start: int, accept_len: int
) -> None:
    """AROUND `_append_decode_hidden_states`: a request gets those of its tokens, and no others.

    Of the last one alone, SGLang itself looks for the end.
    """
    if req.finished_len is not None and req.return_hidden_states != "last":
        accept_len -= max(0, len(req.output_ids) - req.finished_len)
    original(req=req, hidden_states=hidden_states, start=start, accept_len=accept_len)


def finish_in_order(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """AROUND `Req.update_finish_state`: the first token that ends a request is its last.

    SGLang has counted tokens of a thought behind it, too. A request that is aborted ends with the
    first token of its step.
    """
    _finish(original, req, new_accepted_len)
    if req.finished_len is not None:
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _finish(original: Callable[..., None], req: Any, new_accepted_len: int) -> None:
    late, req.dflash_late = getattr(req, "dflash_late", None), None
    params, output = req.sampling_params, req.output_ids
    if params.stop_strs or params.stop_regex_strs or req.to_finish or late == FOLLOWED:
        for end in range(len(output) - new_accepted_len + 1, len(output)):
            with temporarily(req, output_ids=output[:end], grammar=None):
                original(req)
            if req.finished():
                req.finished_len = end if req.finished_len is None else req.finished_len
                return
        new_accepted_len = 1
    with temporarily(req, grammar=req.grammar if late in (None, FOLLOWED) else None):
        original(req, new_accepted_len)
    if late not in (None, ENDED, FOLLOWED) and not req.finished():
        req.to_finish = late


def forget_behind_the_end(session: Any, *_: Any, **__: Any) -> None:
    """BEFORE `Session.create_req`: a turn goes on from the answer that its client has got.

    SGLang goes on from all tokens that the last step committed.
    """
    for node in session.req_nodes.values():
        if node.req.finished():
            node.req.output_ids = node.req.output_ids_through_stop


def known_kv_len(length: int, req: Any) -> int:
    """AFTER `Req.owned_kv_len`: without speculation, the KV of the last token is not computed."""
    known = len(req.origin_input_ids) + max(0, len(req.output_ids_through_stop) - 1)
    return length if req.finished_len is None else min(length, known)


def keep_known_kv(original: Callable[..., bool], sessions: Any, req: Any) -> bool:
    """AROUND `StreamingSession.try_cache_finished_req`: the KV of the last token is not kept.

    It is there only if a later step has computed it.
    """
    slot = sessions.borrowed_slot(req)
    kept = original(sessions, req)
    if kept:
        known = len(req.origin_input_ids) + max(0, len(req.output_ids) - 1)
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, known)
    return kept
