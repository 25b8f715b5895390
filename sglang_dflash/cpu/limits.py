"""Limits of a server that a machine without a GPU needs."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_dflash.seam.flags import attention_tp_size, is_dflash

logger = logging.getLogger(__name__)

KV_BYTES = 2 * 10**9  # default bound of both KV pools together, all ranks
KV_ITEMSIZE = {"bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}  # of a target; else its own


def set_limits(server_args: Any, ranks: int) -> None:
    """Set what is not given, after the arguments of speculation.

    KV memory defaults to what the requests can use, at most 2 GB for both pools of all replicas.
    The ranks share the cores, so they do not need a NUMA node each. ranks: of all machines,
    those that SGLang counts in its list of cores.
    """
    if not server_args.enable_torch_compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang's helpers would need a C++ compiler
    if ranks > 1:
        here = _split_cores(max(1, ranks // server_args.nnodes))
        of_all = "|".join([here] * server_args.nnodes)
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", of_all)
    if server_args.tp_size > 1:
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.path.join(os.sep, "nonexistent", "nccl"))
    config = server_args.get_model_config()
    if server_args.max_total_tokens is None:
        bound = _bytes_bound(server_args)
        if server_args.max_running_requests is not None:
            bound = min(bound, server_args.max_running_requests * config.context_len)
        page = server_args.page_size
        server_args.max_total_tokens = max(page, bound // page * page)
        logger.info(
            "CPU: --max-total-tokens %d (at most %d GB of KV); give the flag to change it.",
            server_args.max_total_tokens,
            KV_BYTES // 10**9,
        )


def _bytes_bound(server_args: Any) -> int:
    """The number of tokens whose KV, of target and draft, fits into KV_BYTES."""
    from sglang.srt.configs.model_config import AttentionArch

    config = server_args.get_model_config()
    if config.attention_arch == AttentionArch.MLA:  # every rank keeps the whole latent vector
        values = attention_tp_size(server_args) * (config.kv_lora_rank + config.qk_rope_head_dim)
    else:
        values = config.get_total_num_kv_heads() * (config.head_dim + config.v_head_dim)
    itemsize = KV_ITEMSIZE.get(server_args.kv_cache_dtype, config.dtype.itemsize)
    per_token = config.num_hidden_layers * values * itemsize
    if is_dflash(server_args):
        from sglang_dflash.checkpoint.served import draft_config

        draft = draft_config(server_args)
        per_token += draft.kv_bytes_per_token(config.dtype.itemsize)
    return int(KV_BYTES // per_token // server_args.dp_size)


def _split_cores(ranks: int) -> str:
    """Cores of each rank, "0|1" for two ranks on two cores. Ranks share cores if there are few."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    return "|".join(
        ",".join(str(cores[(rank * each + i) % len(cores)]) for i in range(each))
        for rank in range(ranks)
    )
