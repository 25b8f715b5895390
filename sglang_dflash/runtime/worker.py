"""`DFlashWorker`: SGLang's spec-v1 scheduler drives it in place of a TP worker."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.server_args import ServerArgs

from sglang_dflash import __version__
from sglang_dflash.compatibility import check_loaded_adapters, longest_request
from sglang_dflash.core.acceptance import Outcome
from sglang_dflash.draft_worker import make_draft_worker
from sglang_dflash.kernels import Kernels
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.options import Options
from sglang_dflash.platforms import platform_of, verify_backend
from sglang_dflash.runtime.commit import Committer
from sglang_dflash.runtime.draft_ahead import DraftAhead, DraftLater, NextDraft
from sglang_dflash.runtime.draft_window import DraftWindow
from sglang_dflash.runtime.metrics import LowAcceptance, MeanWidth, StepMetrics, StepObserver
from sglang_dflash.runtime.part_times import time_on_device, time_on_host
from sglang_dflash.runtime.prefill import Prefill
from sglang_dflash.runtime.propose import Drafter
from sglang_dflash.runtime.recurrent_states import states_of
from sglang_dflash.runtime.sample import TargetSampler
from sglang_dflash.runtime.slots import Slots
from sglang_dflash.runtime.state import DFlashState, HostCopy
from sglang_dflash.runtime.step_times import StepTimer
from sglang_dflash.runtime.verify import Verified, Verifier
from sglang_dflash.runtime.verify_graphs import VerifyGraphs
from sglang_dflash.runtime.verify_width import AdaptiveWidth, FixedWidth, VerifyWidth
from sglang_dflash.target_kv import check_loaded_kv

logger = logging.getLogger(__name__)

NEW_WEIGHTS = "The target has the new weights, the draft keeps its own."


class DFlashWorker:
    """Owns the draft; shares the target's rows and allocator."""

    def __init__(
        self, server_args: ServerArgs, target_worker: TpModelWorker, **place: int | None
    ) -> None:
        """place: GPU, ranks and port, as SGLang passes them to every worker."""
        self.server_args, self.target_worker = server_args, target_worker
        self.model_runner = target_worker.model_runner
        self.model_config = target_worker.model_config
        self.device = target_worker.device
        self.update_weights_from_tensor = target_worker.update_weights_from_tensor
        check_loaded_kv(server_args, target_worker.model_runner)
        check_loaded_adapters(server_args, target_worker.model_runner.model)
        self._options = Options.read(server_args)
        self._make_draft(place)
        self._make_step()
        reports = place["tp_rank"] == 0
        self.mean_width = MeanWidth()
        observers: list[StepObserver] = [self.mean_width]
        if reports:
            observers.append(LowAcceptance(self._options.block_size))
        self.committer = Committer(self._states, observers)
        _keep_block_in_pool(target_worker, self._options.reserved_tokens)
        if reports:
            self._log_draft()

    def _make_draft(self, place: dict[str, Any]) -> None:
        """The draft's worker, its rows, and the writer of its context KV."""
        args = self.server_args
        self._kernels = Kernels.on(self.device)
        pool, allocator = self.target_worker.get_memory_pool()
        self.slots = Slots(pool, allocator, self._options.reserved_tokens)
        # FlashInfer plans a forward on the host, by the true lengths.
        self._exact_lengths = args.speculative_draft_attention_backend == "flashinfer"
        block_size, window = self._options.block_size, None
        if args.speculative_draft_window_size is not None:
            window = DraftWindow(
                pool,
                args.speculative_draft_window_size,
                block_size,
                args.page_size,
                self._exact_lengths,
            )
        draft_pool = pool if window is None else window.pool
        weigh = len(self._options.verify_widths) > 1
        self.draft_worker = make_draft_worker(
            args, self.target_worker, draft_pool, self._kernels, weigh, **place
        )
        self.draft_model_runner = runner = self.draft_worker.model_runner
        self.drafter = Drafter(runner, self.slots.table, window, block_size, self._kernels)
        self.context_kv = ContextKV(runner.model, runner.token_to_kv_pool, self._kernels)

    def _make_step(self) -> None:
        """The target's side of a step, and its policies."""
        args, runner = self.server_args, self.model_runner
        sampler = TargetSampler(runner.sampler, self._kernels)
        self._prefill = Prefill(self.target_worker, sampler, self.context_kv)
        any_width = platform_of(args).unequal_widths
        self._graphs = VerifyGraphs(runner, self._options.verify_widths, any_width)
        self._states = states_of(runner, self._kernels)
        self.verifier = Verifier(self.target_worker, sampler, self._graphs, self._kernels)
        self.verify_width = self._make_verify_width()
        self.next_draft: NextDraft = DraftLater()
        if self._options.draft_ahead:
            self.next_draft = DraftAhead(
                self.drafter,
                self.verifier,
                self.slots,
                self.verify_width,
                self.model_config.context_len,
                exact_lengths=self._exact_lengths,
                plans=verify_backend(args) != "flashinfer",
            )

    def _make_verify_width(self) -> VerifyWidth:
        args, widths = self.server_args, self._options.verify_widths
        block_size = self._options.block_size
        if len(widths) == 1:
            return FixedWidth(widths[0], block_size)
        timer = StepTimer(
            self.model_runner,
            self.drafter,
            self.verifier,
            self.context_kv,
            args.speculative_draft_window_size,
            block_size,
        )
        # SGLang's 3-D positions need equal widths.
        unequal = platform_of(args).unequal_widths and not self.model_runner.model_is_mrope
        return AdaptiveWidth(block_size, timer.measure(widths), unequal)

    @torch.no_grad()
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one prefill or one decode step.

        Inference mode is not used. SGLang's buffers outlive a call and are also written outside of
        it, and its prefill graphs were compiled without inference mode.
        """
        return self._extend(batch) if batch.forward_mode.is_extend() else self._decode(batch)

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step: propose, verify, commit."""
        state: DFlashState = batch.spec_info
        self.slots.reserve(batch.reqs)
        lens = batch.seq_lens, batch.seq_lens_cpu
        block = state.block or self.drafter.propose(batch, state.anchors, *lens)
        choice = self.verify_width.choose(block)
        verified = self.verifier.verify(batch, choice.block)
        copy = HostCopy(verified.accepted.packed)
        self._write_context(verified)
        following = self.next_draft.after_verify(batch, verified, copy)
        outcome = Outcome.unpack(copy.wait())
        batch.spec_info = DFlashState(verified.accepted.bonus, following)
        choice.learn(outcome.num_accepted)
        return self.committer.commit(batch, block, verified, outcome)

    def _write_context(self, verified: Verified) -> None:
        """Write the context KV of the committed positions: the anchor and the accepted drafts."""
        block = verified.block
        slots = block.flatten(verified.accepted.kv_slots)
        self.context_kv.write(verified.output.hidden_states, block.positions, slots)

    def _extend(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one prefill. The host waits only for the first tokens, while the draft still runs."""
        self.verifier.forget()
        prefilled = self._prefill.run(batch)
        anchors, result = prefilled.anchors, prefilled.result
        batch.spec_info = DFlashState(anchors, self.next_draft.after_prefill(batch, anchors))
        # With a tensor, SGLang would merge it on the device with those of the running batches.
        batch.input_ids = anchors
        result.next_token_ids = prefilled.copy.wait().numpy()
        return result

    def clear_cache_pool(self) -> None:
        """Nothing to clear: slots and rows are the target's, and stale draft KV is never read."""

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """SGLang itself updates the target. The draft keeps its weights."""
        return True, NEW_WEIGHTS

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """SGLang itself has updated the target, as above."""
        if recv_req.recapture_cuda_graph:
            self._graphs.capture()
        return True, NEW_WEIGHTS

    def before_new_weights(self) -> None:
        """SGLang may capture the target's graphs again, and it knows those of whole blocks only."""
        self.verifier.forget()
        self._graphs.use(self._options.block_size)

    def count_steps(self, labels: dict[str, Any]) -> None:
        """Count steps and time their parts for Prometheus. labels: SGLang's, with their values."""
        metrics = StepMetrics(self._options.block_size, labels)
        self.committer.observers.append(metrics)
        queued = platform_of(self.server_args).queues_work
        time_forward = time_on_device if queued else time_on_host
        time_forward(self.drafter, "propose", metrics.seconds["draft"].observe)
        time_forward(self.verifier, "verify", metrics.seconds["verify"].observe)
        time_on_host(self.committer, "commit", metrics.seconds["commit"].observe)

    def description(self) -> dict[str, Any]:
        """The draft and how it is served, for the log and `/server_info`."""
        args, draft, options = self.server_args, self.draft_model_runner.model.dflash, self._options
        target = "/".join(sorted(set(args.get_attention_backends())))
        own = self.draft_model_runner.server_args.attention_backend
        return {
            "version": __version__,
            "draft": args.speculative_draft_model_path,
            "family": draft.family,
            "format": draft.format,
            "block_size": options.block_size,
            "verify_width": options.shown_width,
            "draft_ahead": "on" if options.draft_ahead else "off",
            "layers": draft.num_layers,
            "target_layer_ids": list(draft.target_layer_ids),
            "target_attention": target,
            "draft_attention": own,
            "tp": args.tp_size,
        }

    def _log_draft(self) -> None:
        draft = self.draft_model_runner.model.dflash
        if draft.convolution is not None and self.model_runner.dtype == torch.float16:
            logger.warning(
                "DFLASH: a DFlash 2 draft can overflow in float16, and then few drafts are "
                "accepted. Give --dtype bfloat16."
            )
        described = self.description()
        version = described.pop("version")
        fields = " ".join(f"{name}={value}" for name, value in described.items())
        logger.info("sglang-dflash %s: %s", version, fields)


def _keep_block_in_pool(target: TpModelWorker, reserved: int) -> None:
    """Bound request lengths so that the slots reserved for the longest one fit the KV pool."""
    room = longest_request(target.max_total_num_tokens, reserved, target.server_args.page_size)
    if room < target.max_req_len:
        logger.info("Longest request: %d tokens, so that a block fits behind it.", room)
        target.max_req_len, target.max_req_input_len = room, room - 5
