"""Flags, targets and drafts that cannot be served exactly, each refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.checkpoint.tensors import check_values
from sglang_dflash.engine import draft_rules, flag_rules, target_rules
from sglang_dflash.errors import Refusal, Rule, refuse
from sglang_dflash.settings.facts import DraftFacts, Facts
from sglang_dflash.step.reservation import GRAIN, ceil_align, longest
from sglang_dflash.targets import disaggregation, dp_attention, host_cache, hybrid, kv_dtype, lora

SHORTEST_REQUEST = 8  # tokens; SGLang keeps 5 of a request's length for itself
# All rules, for docs/limits.md.
FLAGS: tuple[Rule[Any], ...] = (
    *flag_rules.FIRST,
    *flag_rules.RULES,
    *draft_rules.FIRST,
    *hybrid.STRATEGY_RULES,
    *host_cache.RULES,
    *dp_attention.RULES,
    *disaggregation.RULES,
    kv_dtype.FP4,
    *kv_dtype.RULES,
)
TARGETS: tuple[Rule[Any], ...] = (
    *target_rules.FIT,
    *target_rules.RULES,
    *target_rules.CLASS_RULES,
    hybrid.OTHER_STATES_RULE,
    *hybrid.RULES,
    *kv_dtype.LOADED_RULES,
    *lora.RULES,
    *dp_attention.LOADED_RULES,
)
DRAFTS: tuple[Rule[Any], ...] = (*draft_rules.RULES, *draft_rules.LOADED_RULES)


def check_flags(server_args: ServerArgs) -> None:
    """Raise `Refusal` for flags that do not go with DFLASH."""
    refuse(flag_rules.RULES, Facts(server_args))


def check_running(_: Any, request: Any) -> None:
    """BEFORE `TokenizerControlMixin.set_internal_state`: as when the server starts."""
    for flag in flag_rules.FLAGS:
        value = request.server_args.get(flag.name, flag.served[0])
        if value not in flag.served:
            raise Refusal(f"server_args.{flag.name} is {value}, but {flag.why}.", flag.fix)


def check_target(facts: DraftFacts) -> None:
    """Raise `Refusal` for a target that cannot be served, or not with this draft."""
    refuse(target_rules.FIT, facts)
    kv_dtype.check_kv(facts.args)
    refuse(target_rules.RULES, facts)
    hybrid.check_states_are_replayed(facts)
    host_cache.check_host_cache(facts)
    dp_attention.check_dp_attention(facts)
    disaggregation.check_disaggregation(facts)
    refuse(target_rules.CLASS_RULES, facts)


def check_draft(facts: DraftFacts) -> None:
    """Raise `Refusal` for a draft that cannot be served."""
    refuse(draft_rules.RULES, facts)
    # The weights are read here and when they are loaded: the target comes first, and takes minutes.
    check_values(Path(facts.draft.path), facts.draft.family.marks)
    if facts.draft.mask_embedding:
        read_mask_embedding(facts.draft)


def longest_request(tokens: int, reserved: int, page_size: int) -> int:
    """The longest request for which a KV pool of this size has room; raises `Refusal`.

    reserved: tokens that a step needs after the committed ones.
    """
    room = longest(tokens, reserved, page_size)
    if room < SHORTEST_REQUEST:
        needed = ceil_align(SHORTEST_REQUEST + reserved, math.lcm(GRAIN, page_size))
        raise Refusal(
            f"A KV pool of {tokens} tokens has no room for one request and its block.",
            f"Give --max-total-tokens {needed} or more, or leave more memory for it.",
        )
    return room
