"""The draft's own TP worker: its server arguments, and when its graphs are captured."""

from __future__ import annotations

import copy

import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.server_args import (
    ServerArgs,
    get_global_server_args,
    set_global_server_args_for_scheduler,
)
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_dflash.checkpoint.served import draft_config
from sglang_dflash.kernels import Kernels
from sglang_dflash.method.noise import NoiseTable


def make_draft_worker(
    server_args: ServerArgs,
    target: TpModelWorker,
    pool: ReqToTokenPool,
    kernels: Kernels,
    noise: NoiseTable,
    return_probs: bool,
    **rank: int | None,
) -> TpModelWorker:
    """Make the TP worker of the draft, with this pool of rows and the target's allocator.

    return_probs: the draft also computes the probability of each drafted token.

    The draft's forward reads the target's embedding and LM head. They can be bound only after both
    models exist. So the graphs are captured after that, not inside the constructor.
    """
    config = target.model_config
    args = draft_server_args(server_args, config.context_len, config.dtype)
    saved = get_global_server_args()
    try:
        # With DP attention, the ranks of a replica share its draft, and no others.
        with draft_tp_context(get_attn_tp_group()):
            worker = TpModelWorker(
                server_args=args,
                pp_rank=0,
                is_draft_worker=True,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=target.model_runner.token_to_kv_pool_allocator,
                memory_pool_config=target.model_runner.memory_pool_config,
                **rank,
            )
            width = args.speculative_num_draft_tokens
            worker.model_runner.model.bind(target.model_runner.model, kernels, return_probs, width)
            worker.model_runner.model.keep(noise)
            args.disable_cuda_graph = server_args.disable_cuda_graph
            # Its graphs do not depend on other replicas. Its share of requests and KV does.
            args.enable_dp_attention = False
            worker.model_runner.init_device_graphs()
    finally:
        set_global_server_args_for_scheduler(saved)
    return worker


def draft_server_args(server_args: ServerArgs, context_len: int, dtype: torch.dtype) -> ServerArgs:
    """The arguments of the draft's worker, without graphs.

    context_len, dtype: the target's. The draft reads the target's states and embeddings as they
    are, so it computes in their dtype. The dtype of its own checkpoint does not matter. Its KV has
    this dtype, too, and is never quantised: drafts from FP8 KV are accepted less often.
    """
    args = copy.deepcopy(server_args)
    args.skip_tokenizer_init = True
    args.disable_cuda_graph = args.disable_piecewise_cuda_graph = True
    args.attention_backend = server_args.speculative_draft_attention_backend
    args.speculative_draft_attention_backend = None
    args.prefill_attention_backend = args.decode_attention_backend = None
    block_size = server_args.speculative_num_draft_tokens
    args.speculative_num_draft_tokens = draft_config(server_args).width_of(block_size)
    args.context_length = context_len
    args.dtype = str(dtype).removeprefix("torch.")
    args.kv_cache_dtype = "auto"
    args.enable_lora, args.lora_paths = False, None
    args.forward_hooks = None  # they name the target's modules
    args.model_checksum = None  # it is of the target's files
    return args
