"""Grammars at every block position: each is walked along the drafts, and back again."""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from sglang_dflash.step.copies import to_device


def follows_drafts(req: Req) -> bool:
    """Whether a request's grammar, if it has one, can go along drafts and back again.

    Grammars of SGLang's backends xgrammar and llguidance can. Those of outlines and of backends
    that users register have masks of their own, and need no way back.
    """
    if req.grammar is None:
        return True
    grammar = _without_thought(req.grammar)
    if grammar is None:
        return req.grammar.token_filter_fn in (None, XGrammarGrammarBackend.set_token_filter)
    if _is_llguidance(grammar):
        return not req.sampling_params.ignore_eos  # it cannot go back over several end tokens
    return type(grammar) is XGrammarGrammar


def _without_thought(grammar: BaseGrammarObject) -> BaseGrammarObject | None:
    """The grammar of the answer after a thought. None if there is only a filter of the thought."""
    return grammar.grammar if isinstance(grammar, ReasonerGrammarObject) else grammar


def _is_llguidance(grammar: BaseGrammarObject | None) -> bool:
    """The module imports torch's compiler. Until it is loaded, there are no such grammars."""
    module = sys.modules.get("sglang.srt.constrained.llguidance_backend")
    return module is not None and type(grammar) is module.GuidanceGrammar


def has_mask(req: Req) -> bool:
    """Whether a request's grammar may forbid tokens now or later.

    With `--enable-strict-thinking` every request has a grammar. Without a rule of its own, it
    filters the tokens of a thought, and does nothing after it.
    """
    grammar = req.grammar
    if grammar is None or grammar.finished:
        return False
    if _without_thought(grammar) is None:
        return bool(grammar.tokens_after_end < 0)
    return True


def mask_by_grammar(
    logits: Tensor, reqs: list[Req], info: SamplingBatchInfo, tokens: list[list[int]]
) -> None:
    """Ban in place the tokens that each request's grammar forbids after its output and drafts.

    logits: [B * w, V], of all positions of blocks, w = 1 after a prefill. tokens: B lists of anchor
    and drafts. A draft that the grammar forbids ends the walk: the target cannot draw it, so
    nothing after it is accepted. Requests share a mask if one function applies it. No mask has rows
    of a request without a grammar: llguidance also bans the ids after its tokenizer's in every row.
    """
    alike: dict[Any, list[int]] = {}
    for i, req in enumerate(reqs):
        if has_mask(req):
            apply = req.grammar.apply_vocab_mask
            alike.setdefault(getattr(apply, "__func__", apply), []).append(i)
    for members in alike.values():
        drafts = {}
        for i in members:
            drafts[i] = tokens[i] if follows_drafts(reqs[i]) else tokens[i][:1]
        _mask_alike(logits, reqs, info, drafts, len(tokens[0]))


def _mask_alike(
    logits: Tensor,
    reqs: list[Req],
    info: SamplingBatchInfo,
    drafts: dict[int, list[int]],
    width: int,
) -> None:
    """Mask the logits of requests whose grammars have one kind of mask.

    drafts: by the index of the request, the anchor and those drafts that its grammar can follow.
    """
    rows: list[int] = []
    for i, tokens in drafts.items():
        rows.extend(range(i * width, i * width + len(tokens)))
    first = reqs[next(iter(drafts))].grammar
    mask = first.allocate_vocab_mask(
        vocab_size=info.vocab_size, batch_size=len(rows), device=info.device
    )
    if _is_llguidance(_without_thought(first)):
        mask.fill_(-1)  # it is the mask of an earlier call
    row = 0
    for i, tokens in drafts.items():
        _walk(reqs[i].grammar, tokens, mask, row)
        row += len(tokens)
    every = len(rows) == len(logits)
    index = slice(None) if every else to_device(rows, logits.device)
    # SGLang's kernel takes the width of a row for its stride, so the rows must be adjacent.
    dense = logits.contiguous() if every else logits[index]
    first.apply_vocab_mask(logits=dense, vocab_mask=first.move_vocab_mask(mask, info.device))
    if dense is not logits:
        logits[index] = dense


def _walk(grammar: BaseGrammarObject, tokens: list[int], mask: Tensor, row: int) -> None:
    """Fill mask rows as long as the drafts are legal, then roll the grammar back."""
    walked = 0
    in_thought = False  # rows of a thought are alike, and SGLang takes long to make one
    while not grammar.is_terminated():
        was_in_thought = in_thought
        in_thought = _is_in_thought(grammar)
        if in_thought and was_in_thought:
            mask[row + walked] = mask[row + walked - 1]
        elif not _fill(grammar, mask, row + walked):
            return
        if walked + 1 == len(tokens):
            break
        token = tokens[walked + 1]
        if not _allows(mask[row + walked], token):
            break
        grammar.accept_token(token)
        walked += 1
    if walked:
        grammar.rollback(walked)


def _fill(grammar: BaseGrammarObject, mask: Tensor, row: int) -> bool:
    """Fill a mask row. False if the grammar has failed, as one of llguidance may, for good.

    It has refused a token, which ends the request later, or has reached its own limits.
    """
    try:
        grammar.fill_vocab_mask(mask, row)
    except ValueError:
        return False
    return True


def _is_in_thought(grammar: BaseGrammarObject) -> bool:
    """Whether a request thinks, may go on thinking, and its grammar says nothing of thoughts."""
    if not isinstance(grammar, ReasonerGrammarObject):
        return False
    if getattr(grammar, "reasoning_in_grammar", False):  # SGLang 0.5.23
        return False
    return bool(grammar._is_thinking() and grammar._can_think_more())


def _allows(mask: Tensor, token: int) -> bool:
    """mask: [n] int32, bit i of word w allows token 32 w + i. Ids after it are forbidden."""
    word = token // 32
    return word < len(mask) and bool(int(mask[word]) >> token % 32 & 1)
