"""Server arguments of DFLASH: read the draft and set what follows from it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.files import read_json
from sglang_dflash.checkpoint.formats import speculators
from sglang_dflash.checkpoint.served import draft_config, served_draft
from sglang_dflash.engine import draft_rules, flag_rules, refusals
from sglang_dflash.errors import Refusal, refuse
from sglang_dflash.settings.facts import DraftFacts, Facts
from sglang_dflash.settings.options import Options, has_adapters

logger = logging.getLogger(__name__)

ALL_REDUCE = (
    "DFLASH turns --enable-flashinfer-allreduce-fusion off, because it would sum a layer's output "
    "after its hidden states are captured."
)
PREFILL_GRAPHS = (
    "DFLASH turns piecewise CUDA graphs off, because SGLang stores no recurrent states in them."
)
OVERRIDES = (
    "DFLASH: --json-model-override-args changes the target only. The draft keeps the RoPE of its "
    "own config.json (%s), for as many positions as the target serves."
)
MAX_RUNNING_REQUESTS = 48  # default


def adopt_speculators(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs.__post_init__`: accept a speculators checkpoint as --model-path.

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


def check_target_exists(server_args: ServerArgs) -> None:
    """BEFORE `ServerArgs.__post_init__`, where SGLang takes a missing folder for a hub id."""
    refuse([flag_rules.MISSING_TARGET], Facts(server_args))


def check_first(server_args: ServerArgs) -> None:
    """Refuse what SGLang would read in its own way before `handle_dflash` is called."""
    refuse([flag_rules.NO_WINDOW], Facts(server_args))
    draft_config(server_args)


def _config_of(server_args: ServerArgs) -> dict[str, Any]:
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


def handle_dflash(server_args: ServerArgs) -> None:
    """REPLACE `speculative_hook._handle_dflash`; raises `Refusal` for what cannot be served."""
    refusals.check_flags(server_args)
    draft, tensors = served_draft(server_args)
    facts = DraftFacts(server_args, draft, tensors)
    refuse(draft_rules.FIRST, facts)
    _set_block_size(facts)
    server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
    server_args.speculative_draft_attention_backend = draft_rules.draft_backend(facts)
    refusals.check_target(facts)
    refusals.check_draft(facts)
    server_args.speculative_draft_model_quantization = draft.quantization_method
    server_args.dflash = chosen = Options.read(server_args)  # or refuse; processes get it by pickle
    if server_args.max_total_tokens is not None:  # else `build_worker` refuses what memory allows
        page_size = server_args.page_size or 1
        tokens = server_args.max_total_tokens
        refusals.longest_request(tokens, chosen.reserved_tokens, page_size)  # or refuse
    if has_adapters(server_args):
        [width] = chosen.verify_widths
        logger.info("DFLASH: LoRA adapters need one verify width, which is %d.", width)
    if json.loads(server_args.json_model_override_args):
        ropes = {f"theta {rope.theta:g}, scaling {rope.scaling}" for rope in draft.rope}
        logger.info(OVERRIDES, "; ".join(sorted(ropes)))
    _bound_requests(server_args)
    server_args.disable_overlap_schedule = True  # spec-v1: the scheduler waits for the commit
    if server_args.enable_flashinfer_allreduce_fusion:
        logger.info(ALL_REDUCE)
        server_args.enable_flashinfer_allreduce_fusion = False
    if server_args.enable_mamba_extra_buffer() and not server_args.disable_piecewise_cuda_graph:
        logger.info(PREFILL_GRAPHS)
        server_args.disable_piecewise_cuda_graph = True
    # A weight update never contains the draft's weights, so a memory release needs a copy of them.
    server_args.enable_draft_weights_cpu_backup = server_args.enable_memory_saver


def _bound_requests(server_args: ServerArgs) -> None:
    """Set the number of running requests.

    For a hybrid target, `targets.hybrid.bound_states` may lower the default, but not a given one.
    """
    given = server_args.max_running_requests
    if given is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
        logger.info(
            "DFLASH: --max-running-requests %d; give the flag to change it.", MAX_RUNNING_REQUESTS
        )
    elif server_args.max_mamba_cache_size is None and server_args.disable_radix_cache:
        server_args.max_mamba_cache_size = given // server_args.dp_size


def _set_block_size(facts: DraftFacts) -> None:
    size, longest = draft_rules.block_size(facts), facts.draft.block_size
    facts.args.speculative_num_draft_tokens = size
    if size < longest:
        logger.warning(
            f"DFLASH: the block size is {size}, but the draft was trained for {longest} and may "
            "draft worse with fewer masks. To keep all masks, use "
            f"--speculative-dflash-verify-width {size} instead."
        )
