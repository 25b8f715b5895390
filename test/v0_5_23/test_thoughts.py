"""Grammars that say something of thoughts, too, as those of a chat's template may."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.speculative.spec_utils import traverse_tree
from transformers import AutoTokenizer

from sglang_dflash.logits.grammar import _walk
from sglang_dflash.tiny import TARGET

VOCABULARY = 2048
TOKENIZER = AutoTokenizer.from_pretrained(TARGET)


def thought(backend: XGrammarGrammarBackend, covered: bool) -> ReasonerGrammarObject:
    """A request that thinks, with a grammar of its answer; covered: and of the thought."""
    grammar = ReasonerGrammarObject(
        grammar=backend.dispatch_regex("abcabc"),
        think_end_ids=[5],
        allocate_vocab_mask_fn=backend.allocate_vocab_mask,
    )
    grammar.maybe_init_reasoning(True)
    if covered:
        grammar.set_reasoning_in_grammar()
    return grammar


@pytest.mark.parametrize("covered", [False, True])
def test_masks_are_those_of_sglang(covered: bool) -> None:
    backend = XGrammarGrammarBackend(TOKENIZER, vocab_size=VOCABULARY)
    drafts = [0, *TOKENIZER.convert_tokens_to_ids(["a", "b", "c"])]
    ours, theirs = (backend.allocate_vocab_mask(VOCABULARY, 4, "cpu").fill_(-1) for _ in range(2))
    _walk(thought(backend, covered), drafts, ours, 0)
    links = torch.tensor([1, 2, 3, -1]), torch.full((4,), -1)
    traverse_tree(*links, torch.tensor(drafts), thought(backend, covered), theirs, VOCABULARY)
    assert ours.tolist() == theirs.tolist()
    assert bool((ours != -1).any()) == covered
