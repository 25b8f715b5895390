"""Builds a `DFlashWorker` from its parts. Nothing else knows all of them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_attention_tp_rank
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from sglang_dflash.adaptive.row_graphs import RowGraphs
from sglang_dflash.adaptive.step_times import StepTimer
from sglang_dflash.adaptive.verify_graphs import NoGraphs, WidthGraphs
from sglang_dflash.adaptive.verify_width import AdaptiveWidth, FixedWidth
from sglang_dflash.checkpoint.served import draft_config
from sglang_dflash.engine.draft_rules import check_loaded_head
from sglang_dflash.engine.refusals import longest_request
from sglang_dflash.engine.v0_5_13.draft_worker import make_draft_worker
from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.first_launches import launch_draws
from sglang_dflash.logits.logprobs import SGLangLogprobs
from sglang_dflash.logits.rules import RequestedRules
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.report.metrics import RequestCounts, StepLog, keep_in_histogram
from sglang_dflash.report.worker import Report
from sglang_dflash.settings.options import Options
from sglang_dflash.settings.platforms import platform_of, verify_backend
from sglang_dflash.step.clock import StepClock
from sglang_dflash.step.commit import Committer
from sglang_dflash.step.draft_ahead import DraftAhead, DraftLater
from sglang_dflash.step.noise import Noise
from sglang_dflash.step.policies import ContextObserver, NextDraft, VerifyWidth
from sglang_dflash.step.prefill import Prefill
from sglang_dflash.step.propose import Drafter
from sglang_dflash.step.sample import TargetSampler
from sglang_dflash.step.slots import Slots
from sglang_dflash.step.verify import Verifier
from sglang_dflash.step.window import DraftWindow
from sglang_dflash.step.worker import DFlashWorker
from sglang_dflash.targets.arrivals import Arrivals, WriteOnly
from sglang_dflash.targets.disaggregation import sent_kv
from sglang_dflash.targets.dp_attention import check_loaded_parts
from sglang_dflash.targets.kv_dtype import check_loaded_kv
from sglang_dflash.targets.lora import check_loaded_adapters
from sglang_dflash.targets.recurrent_states import states_of
from sglang_dflash.trainer.features import FeatureFiles
from sglang_dflash.trainer.new_weights import NewWeights

logger = logging.getLogger(__name__)

MODELS = "sglang_dflash.model"  # where SGLang finds the draft's class


def build_worker(
    server_args: ServerArgs, target_worker: TpModelWorker, **rank: Any
) -> DFlashWorker:
    """The worker of one rank. rank: GPU, ranks and port, as SGLang passes them to every worker.

    Raises `Refusal` for a target that cannot be served, which is known only when it is loaded.
    """
    target = target_worker.model_runner
    check_loaded_kv(server_args, target)
    check_loaded_adapters(server_args, target.model)
    check_loaded_head(server_args, target.model)
    check_loaded_parts(server_args, target.model)
    options: Options = server_args.dflash
    first_rank = get_attention_tp_rank() == 0  # of this replica
    platform = platform_of(server_args)
    kernels, clock = Kernels.on(target_worker.device), StepClock(platform.queues_work)
    pool, allocator = target_worker.get_memory_pool()
    slots = Slots(pool, allocator, options.reserved_tokens)
    noise = Noise(
        len(slots.table),
        target_worker.device,
        kernels,
        server_args.enable_deterministic_inference,
        f"{target_worker.random_seed} {rank['dp_rank']}",
    )
    # FlashInfer plans a forward on the host, by the true lengths.
    exact_lengths = server_args.speculative_draft_attention_backend == "flashinfer"
    window = None
    if server_args.speculative_draft_window_size is not None:
        window = DraftWindow(
            pool,
            server_args.speculative_draft_window_size,
            options.block_size,
            server_args.page_size,
            exact_lengths,
        )
    draft_worker = make_draft_worker(
        server_args,
        target_worker,
        pool if window is None else window.pool,
        kernels,
        noise.table,
        return_probs=len(options.verify_widths) > 1,
        **rank,
    )
    draft = draft_worker.model_runner
    drafter = Drafter(draft, slots.table, window, options.block_size, kernels, clock)
    context_kv = ContextKV(draft.model, draft.token_to_kv_pool, kernels, platform.queues_work)
    target.dflash_new_weights = NewWeights(draft.model, context_kv)
    rules = RequestedRules()
    logprobs = SGLangLogprobs(target.sampler)
    sampler = TargetSampler(noise, rules, kernels)
    graphs = _verify_graphs(server_args, options, target)
    vocab_size, dtypes = target.model_config.vocab_size, {torch.float32, target.dtype}
    launch_draws(kernels, noise.table, vocab_size, options.block_size, dtypes, graphs.ragged)
    verifier = Verifier(target_worker, sampler, noise, rules, graphs, kernels, clock)
    verify_width: VerifyWidth = FixedWidth(options.verify_widths[0])
    if len(options.verify_widths) > 1 and server_args.disaggregation_mode != "prefill":
        window_size = server_args.speculative_draft_window_size
        parts = target, drafter, verifier, context_kv, window_size
        verify_width = AdaptiveWidth(
            options.block_size,
            StepTimer(*parts, options.block_size, graphs, kernels).measure(),
            graphs,
            kernels,
            target_worker.device,
            platform.queues_work,
        )
    # SGLang prepares adapters when it makes a batch, so a width that is chosen ahead lacks them.
    lacks_adapters = server_args.enable_lora and len(options.verify_widths) > 1
    next_draft: NextDraft = DraftLater()
    if options.draft_ahead:
        next_draft = DraftAhead(
            drafter,
            verifier,
            slots,
            verify_width,
            target_worker.model_config.context_len,
            exact_lengths=exact_lengths,
            # With DP attention, only SGLang's own batch knows the sizes of the other replicas.
            plans=verify_backend(server_args) != "flashinfer"
            and not lacks_adapters
            and not server_args.enable_dp_attention,
        )
    if server_args.disaggregation_mode == "prefill":
        next_draft = WriteOnly()
    elif server_args.disaggregation_mode == "decode":
        sent_kv(server_args)  # a digest that no request shall wait for
        Arrivals(pool, draft.token_to_kv_pool, noise, next_draft)
    context_observers: list[ContextObserver] = []
    if options.features is not None and first_rank:
        num_features = len(draft_config(server_args).target_layer_ids)
        context_observers.append(FeatureFiles(options.features, num_features, target.model))
    report = Report(server_args, draft, options, clock, rank["dp_rank"])
    report.observers += [RequestCounts(), StepLog(keep_in_histogram)]
    if first_rank:
        report.begin()
    _keep_block_in_pool(target_worker, options.reserved_tokens)
    return DFlashWorker(
        target_worker,
        draft_worker,
        slots=slots,
        drafter=drafter,
        context_kv=context_kv,
        context_observers=context_observers,
        prefill=Prefill(target_worker, sampler, noise, logprobs, context_kv, context_observers),
        verifier=verifier,
        verify_width=verify_width,
        next_draft=next_draft,
        committer=Committer(states_of(target), logprobs, report.observers, clock),
        graphs=graphs,
        report=report,
    )


def _verify_graphs(
    server_args: ServerArgs, options: Options, target: ModelRunner
) -> NoGraphs | WidthGraphs | RowGraphs:
    """What a step may verify."""
    widths = options.verify_widths
    if platform_of(server_args).ragged_widths:
        return NoGraphs(widths, ragged=not target.model_is_mrope)
    if len(widths) > 1 and _takes_any_rows(server_args, target):
        return RowGraphs(target)
    return WidthGraphs(target, widths)


def _takes_any_rows(server_args: ServerArgs, target: ModelRunner) -> bool:
    """Whether every part of SGLang serves requests with different numbers of rows on a GPU."""
    backend = verify_backend(server_args)
    views_equal_widths = (
        target.model_is_mrope
        or target.is_hybrid_swa
        or target.mambaish_config is not None
        or target.kv_cache_dtype != target.dtype  # scales have a row for each request of a graph
        or server_args.enable_deterministic_inference
        or server_args.kv_canary != "none"
        or server_args.enable_lora
        or enable_num_token_non_padded()
    )
    graphs = target.graph_runner
    has_graphs = graphs is not None and graphs.max_bs > 1  # of one request all rows are free
    return has_graphs and backend in ("fa3", "triton") and not views_equal_widths


def _keep_block_in_pool(target: TpModelWorker, reserved: int) -> None:
    """Bound request lengths so that the slots reserved for the longest one fit the KV pool."""
    room = longest_request(target.max_total_num_tokens, reserved, target.server_args.page_size)
    if room < target.max_req_len:
        logger.info("Longest request: %d tokens, so that a block fits after it.", room)
        target.max_req_len, target.max_req_input_len = room, room - 5
