"""Server arguments of DFLASH under SGLang 0.5.23, which are resolved without being written to."""

from __future__ import annotations

from typing import Any

from sglang_dflash.engine import flag_rules, refusals
from sglang_dflash.engine import server_args as every_release
from sglang_dflash.engine.v0_5_23 import rules
from sglang_dflash.errors import refuse
from sglang_dflash.seam.resolving import Arguments
from sglang_dflash.settings.facts import Facts
from sglang_dflash.settings.options import NO_FLAGS, flags_given


def adopt_speculators_once(server_args: Any) -> None:
    """BEFORE `ServerArgs.resolve_once`, which may be called again."""
    if not _is_resolved(server_args):
        every_release.adopt_speculators(server_args)


def check_flags(server_args: Any) -> None:
    """BEFORE `ServerArgs.resolve_once`, in which SGLang itself changes or refuses some of them."""
    if not _is_resolved(server_args):
        refuse([flag_rules.MISSING_TARGET, *rules.FLAGS], Facts(server_args))


def check_target(server_args: Any) -> None:
    """BEFORE `handle_model_specific_adjustments`, whose assertions are about such targets."""
    refuse(rules.TARGETS, Facts(Arguments(server_args)))


def handle_dflash(server_args: Any) -> None:
    """REPLACE `speculative_hook._handle_dflash`; raises `Refusal` for what cannot be served."""
    arguments = Arguments(server_args)
    refusals.check_flags(arguments)
    with flags_given(getattr(server_args, "dflash_flags", NO_FLAGS)):
        refuse(rules.OWN_FLAGS, Facts(arguments))
        every_release.serve_draft(arguments)
    # SGLang reads `auto` as each model's own, and the draft computes with the target's states.
    arguments.dtype = str(arguments.get_model_config().dtype).removeprefix("torch.")
    arguments.speculative_draft_kv_cache_dtype = "auto"  # never the target's FP8
    arguments.enable_draft_weights_cpu_backup = arguments.enable_memory_saver


def _is_resolved(server_args: Any) -> bool:
    return getattr(server_args, "_resolution_finished", False)
