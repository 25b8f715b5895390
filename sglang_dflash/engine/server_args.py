"""Server arguments of DFLASH: read the draft, refuse what cannot be served, set what follows."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.formats import speculators
from sglang_dflash.checkpoint.served import draft_config, served_draft
from sglang_dflash.engine import draft_rules, flag_rules, refusals
from sglang_dflash.errors import Refusal, refuse
from sglang_dflash.seam.flags import attention_tp_size
from sglang_dflash.settings.block_size import longest_block
from sglang_dflash.settings.facts import DraftFacts, Facts
from sglang_dflash.settings.options import Options

logger = logging.getLogger(__name__)

OVERRIDES = (
    "DFLASH: --json-model-override-args changes the target only. The draft keeps the RoPE of its "
    "own config.json (%s), for as many positions as the target serves."
)
MAX_RUNNING_REQUESTS = 48  # default


def adopt_speculators(server_args: Any) -> None:
    """BEFORE SGLang resolves its arguments: accept a speculators checkpoint as --model-path.

    The checkpoint is the draft, and its config names the target. Explicit flags win.
    """
    raw = _config_of(server_args)
    if speculators.matches(raw):
        verifier = speculators.verifier_of(raw)
        if verifier is None:
            raise Refusal(
                f"The folder {server_args.model_path} is a speculators draft that names no target.",
                "Give the target as --model-path and this folder as "
                "--speculative-draft-model-path.",
            )
        server_args.speculative_algorithm = "DFLASH"
        if server_args.speculative_draft_model_path is None:
            server_args.speculative_draft_model_path = server_args.model_path
        logger.info("%s is a DFlash draft; its target is %s.", server_args.model_path, verifier)
        server_args.model_path = verifier
        check_target_exists(server_args)


def check_target_exists(server_args: Any) -> None:
    """BEFORE SGLang resolves its arguments, where SGLang takes a missing folder for a hub id."""
    refuse([flag_rules.MISSING_TARGET], Facts(server_args))


def check_first(server_args: Any) -> None:
    """Refuse what SGLang would read in its own way before `handle_dflash` is called."""
    refuse([flag_rules.NO_WINDOW], Facts(server_args))
    draft_config(server_args)


def _config_of(server_args: Any) -> dict[str, Any]:
    """The config.json of --model-path. It is empty if the path is no folder.

    SGLang reads the files of a target itself, so they may be links to anywhere.
    """
    file = (Path(server_args.model_path) / "config.json").resolve()
    try:
        return read_json(file) if os.path.isfile(file) else {}
    except Refusal:
        if server_args.speculative_algorithm is None:  # nothing asks for DFLASH: SGLang reads it
            return {}
        raise


def serve_draft(server_args: Any) -> DraftFacts:
    """Set what follows from the draft; raises `Refusal` for what cannot be served.

    Arguments that are set: the block size, the draft's attention backend and quantisation, the
    number of running requests, and `dflash`, the options of this package.
    """
    refusals.check_flags(server_args)
    draft, tensors = served_draft(server_args)
    facts = DraftFacts(server_args, draft, tensors)
    refuse(draft_rules.FIRST, facts)
    _set_block_size(facts)
    server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
    server_args.speculative_draft_attention_backend = draft_rules.draft_backend(facts)
    refusals.check_target(facts)
    refusals.check_draft(facts)
    method = draft.quantization_method
    if method in ("awq", "gptq") and str(server_args.get_model_config().dtype) != "torch.float16":
        method = None  # SGLang's kernels of that name need float16; by itself it takes Marlin's
    server_args.speculative_draft_model_quantization = method
    server_args.dflash = chosen = Options.read(server_args)  # or refuse; processes get it by pickle
    if server_args.max_total_tokens is not None:  # else the worker refuses what memory allows
        page_size = server_args.page_size or 1
        tokens = server_args.max_total_tokens
        refusals.longest_request(tokens, chosen.reserved_tokens, page_size)  # or refuse
    if json.loads(server_args.json_model_override_args):
        ropes = {f"theta {rope.theta:g}, scaling {rope.scaling}" for rope in draft.rope}
        logger.info(OVERRIDES, "; ".join(sorted(ropes)))
    if server_args.max_running_requests is None:
        # SGLang divides it among the replicas of one target.
        replicas = server_args.tp_size // attention_tp_size(server_args)
        server_args.max_running_requests = default = MAX_RUNNING_REQUESTS * replicas
        logger.info("DFLASH: --max-running-requests %d; give the flag to change it.", default)
    return facts


def _set_block_size(facts: DraftFacts) -> None:
    size, longest = draft_rules.block_size(facts), longest_block(facts.draft)
    facts.args.speculative_num_draft_tokens = size
    if size < longest:
        logger.warning(
            f"DFLASH: the block size is {size}, but the draft was trained for {longest} and may "
            "draft worse with fewer masks. To keep all masks, use "
            f"--speculative-dflash-verify-width {size} instead."
        )
