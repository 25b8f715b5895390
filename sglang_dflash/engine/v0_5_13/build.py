"""Builds a `DFlashWorker` from its parts. Nothing else knows all of them."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from sglang_dflash.adaptive.step_times import StepTimer
from sglang_dflash.adaptive.verify_graphs import VerifyGraphs
from sglang_dflash.adaptive.verify_width import AdaptiveWidth, FixedWidth
from sglang_dflash.engine.refusals import longest_request
from sglang_dflash.engine.v0_5_13.draft_worker import make_draft_worker
from sglang_dflash.kernels import Kernels
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
from sglang_dflash.step.policies import NextDraft, VerifyWidth
from sglang_dflash.step.prefill import Prefill
from sglang_dflash.step.propose import Drafter
from sglang_dflash.step.sample import TargetSampler
from sglang_dflash.step.slots import Slots
from sglang_dflash.step.verify import Verifier
from sglang_dflash.step.window import DraftWindow
from sglang_dflash.step.worker import DFlashWorker
from sglang_dflash.targets.kv_dtype import check_loaded_kv
from sglang_dflash.targets.lora import check_loaded_adapters
from sglang_dflash.targets.recurrent_states import states_of

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
    options: Options = server_args.dflash
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
    rules = RequestedRules()
    logprobs = SGLangLogprobs(target.sampler)
    sampler = TargetSampler(noise, rules, kernels)
    graphs = VerifyGraphs(target, options.verify_widths, platform.ragged_widths)
    verifier = Verifier(target_worker, sampler, noise, rules, graphs, kernels, clock)
    verify_width = _verify_width(server_args, options, target, drafter, verifier, context_kv)
    next_draft: NextDraft = DraftLater()
    if options.draft_ahead:
        next_draft = DraftAhead(
            drafter,
            verifier,
            slots,
            verify_width,
            target_worker.model_config.context_len,
            exact_lengths=exact_lengths,
            plans=verify_backend(server_args) != "flashinfer",
        )
    report = Report(server_args, draft, options, clock)
    report.observers += [RequestCounts(), StepLog(keep_in_histogram)]
    if rank["tp_rank"] == 0:
        report.begin()
    _keep_block_in_pool(target_worker, options.reserved_tokens)
    return DFlashWorker(
        target_worker,
        draft_worker,
        slots=slots,
        drafter=drafter,
        context_kv=context_kv,
        prefill=Prefill(target_worker, sampler, noise, logprobs, context_kv),
        verifier=verifier,
        verify_width=verify_width,
        next_draft=next_draft,
        committer=Committer(states_of(target), logprobs, report.observers, clock),
        graphs=graphs,
        report=report,
    )


def _verify_width(
    server_args: ServerArgs,
    options: Options,
    target: ModelRunner,
    drafter: Drafter,
    verifier: Verifier,
    context_kv: ContextKV,
) -> VerifyWidth:
    """The policy for these widths. `auto` measures the times of steps first."""
    widths, block_size = options.verify_widths, options.block_size
    if len(widths) == 1:
        return FixedWidth(widths[0], block_size)
    window = server_args.speculative_draft_window_size
    timer = StepTimer(target, drafter, verifier, context_kv, window, block_size)
    # SGLang's 3-D positions need equal widths.
    ragged = platform_of(server_args).ragged_widths and not target.model_is_mrope
    return AdaptiveWidth(block_size, timer.measure(widths), ragged)


def _keep_block_in_pool(target: TpModelWorker, reserved: int) -> None:
    """Bound request lengths so that the slots reserved for the longest one fit the KV pool."""
    room = longest_request(target.max_total_num_tokens, reserved, target.server_args.page_size)
    if room < target.max_req_len:
        logger.info("Longest request: %d tokens, so that a block fits after it.", room)
        target.max_req_len, target.max_req_input_len = room, room - 5
