"""Server arguments of DFLASH that only the spec-v1 scheduler needs."""

from __future__ import annotations

import logging

from sglang.srt.server_args import ServerArgs

from sglang_dflash.engine.server_args import serve_draft

logger = logging.getLogger(__name__)

ALL_REDUCE = (
    "DFLASH turns --enable-flashinfer-allreduce-fusion off, because it would sum a layer's output "
    "after its hidden states are captured."
)
PREFILL_GRAPHS = (
    "DFLASH turns piecewise CUDA graphs off, because SGLang stores no recurrent states in them."
)

LM_HEAD = "DFLASH turns --enable-dp-lm-head on, because a replica drafts alone."


def handle_dflash(server_args: ServerArgs) -> None:
    """REPLACE `speculative_hook._handle_dflash`; raises `Refusal` for what cannot be served."""
    given = server_args.max_running_requests
    serve_draft(server_args)
    # For a hybrid target, `targets.hybrid.bound_states` may lower the default, but not a given one.
    sized = server_args.max_mamba_cache_size is not None
    if given is not None and not sized and server_args.disable_radix_cache:
        server_args.max_mamba_cache_size = given
    server_args.disable_overlap_schedule = True  # spec-v1: the scheduler waits for the commit
    if server_args.enable_flashinfer_allreduce_fusion:
        logger.info(ALL_REDUCE)
        server_args.enable_flashinfer_allreduce_fusion = False
    if server_args.enable_mamba_extra_buffer() and not server_args.disable_piecewise_cuda_graph:
        logger.info(PREFILL_GRAPHS)
        server_args.disable_piecewise_cuda_graph = True
    if server_args.enable_dp_attention and not server_args.enable_dp_lm_head:
        logger.info(LM_HEAD)
        server_args.enable_dp_lm_head = True
    # A weight update never contains the draft's weights, so a memory release needs a copy of them.
    server_args.enable_draft_weights_cpu_backup = server_args.enable_memory_saver
