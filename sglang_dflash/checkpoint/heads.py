"""Fields of a DSpark draft's heads. Its publishers share them."""

from __future__ import annotations

from sglang_dflash.checkpoint.config import Confidence, Markov
from sglang_dflash.checkpoint.fields import Fields

MARKOV_KINDS = ("vanilla", "gated", "rnn")


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
            f"has markov_head_type = {kind!r}, which must be one of {', '.join(MARKOV_KINDS)}"
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
        raise fields.refuse("has confidence_head_with_markov, but markov_rank 0")
    return Confidence(with_markov)
