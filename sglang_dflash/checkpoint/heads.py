"""Fields of DSpark and DFlash 2 drafts beside those of DFlash. Their publishers share them."""

from __future__ import annotations

from sglang_dflash.checkpoint.config import Confidence, Convolution, Markov, Selector
from sglang_dflash.checkpoint.fields import Fields
from sglang_dflash.errors import shown

MARKOV_KINDS = ("vanilla", "gated", "rnn")
# Of a position. Published selectors have 16, and each is a row of a codebook.
MOST_CANDIDATES = 1024


def read_markov(fields: Fields, default_rank: int) -> Markov | None:
    """The Markov head. None for rank 0: each position is then predicted by itself."""
    rank = fields.optional_int("markov_rank")
    if rank is None:
        rank = default_rank
    if rank == 0:
        return None
    kind = fields.raw.get("markov_head_type") or "vanilla"
    if kind not in MARKOV_KINDS:
        raise fields.refuse(
            f"has markov_head_type = {shown(kind)}, which must be one of {', '.join(MARKOV_KINDS)}"
        )
    return Markov(kind, rank)


def read_confidence(
    fields: Fields, markov: Markov | None, enabled: bool, with_markov: bool
) -> Confidence | None:
    """The confidence head, or None.

    enabled, with_markov: the format's defaults. markov: the draft's Markov head.
    """
    if not fields.boolean("enable_confidence_head", enabled):
        return None
    with_markov = fields.boolean("confidence_head_with_markov", with_markov)
    if with_markov and markov is None:
        raise fields.refuse(
            "has markov_rank 0, and a confidence head that reads the Markov head",
            "State enable_confidence_head or confidence_head_with_markov as false.",
        )
    return Confidence(with_markov)


def read_convolution(fields: Fields, hidden_size: int, draft_width: int) -> Convolution | None:
    """The convolutions of a DFlash 2 draft, or None.

    hidden_size, draft_width: the draft's. speculators refuses more taps than positions, too.
    """
    stated = _pair(fields, "conv_kernel_size", "conv_group_size")
    if stated is None:
        return None
    taps, group = stated
    if hidden_size % group:
        raise fields.refuse(
            f"has conv_group_size = {group}, which does not divide hidden_size = {hidden_size}"
        )
    if taps > draft_width:
        raise fields.refuse(
            f"has conv_kernel_size = {taps}, which is more than block_size = {draft_width}"
        )
    return Convolution(taps, group)


def read_selector(fields: Fields, vocab_size: int) -> Selector | None:
    """The candidate selector of a DFlash 2 draft, or None. vocab_size: the target's."""
    stated = _pair(fields, "selector_rank", "selector_top_k")
    if stated is None:
        return None
    rank, top_k = stated
    if top_k > MOST_CANDIDATES:
        raise fields.refuse(
            f"has selector_top_k = {top_k}, which must be at most {MOST_CANDIDATES}"
        )
    if top_k > vocab_size:
        raise fields.refuse(
            f"has selector_top_k = {top_k}, which is more than vocab_size = {vocab_size}"
        )
    return Selector(rank, top_k)


def _pair(fields: Fields, one: str, other: str) -> tuple[int, int] | None:
    """Two positive integers, or None if both are absent."""
    first, second = fields.optional_positive(one), fields.optional_positive(other)
    if first is None and second is None:
        return None
    if first is None or second is None:
        stated, absent = (other, one) if first is None else (one, other)
        raise fields.refuse(f"has {stated} but no {absent}")
    return first, second
