"""`DFlashWorker`: what SGLang's spec-v1 scheduler drives in place of a TP worker."""

from __future__ import annotations

import logging

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from sglang.srt.server_args import (
    ServerArgs,
    get_global_server_args,
    set_global_server_args_for_scheduler,
)
from torch import Tensor

from sglang_dflash import __version__
from sglang_dflash.core.block import block_positions
from sglang_dflash.core.slots import longest
from sglang_dflash.cpu.graphs import use_graphs
from sglang_dflash.errors import Refusal
from sglang_dflash.flags import draft_ahead, reserved_tokens, verify_widths
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.runtime.committer import Committer, append_prompt_states
from sglang_dflash.runtime.drafter import Drafter
from sglang_dflash.runtime.draw import TargetDraw
from sglang_dflash.runtime.logprobs import attach_after_prefill
from sglang_dflash.runtime.metrics import StepCounters
from sglang_dflash.runtime.slots import Slots
from sglang_dflash.runtime.state import DFlashBlock, DFlashState, to_host
from sglang_dflash.runtime.verifier import Verified, Verifier
from sglang_dflash.runtime.width import BestWidths, Widths
from sglang_dflash.runtime.window import DraftWindow
from sglang_dflash.server_args import draft_server_args, verify_backend

logger = logging.getLogger(__name__)


class DFlashWorker:
    """Owns the draft; shares the target's rows and allocator."""

    def __init__(
        self, server_args: ServerArgs, target_worker: TpModelWorker, **place: int | None
    ) -> None:
        """place: GPU, ranks and port, as SGLang hands them to every worker."""
        self.server_args = server_args
        self.target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.model_config = target_worker.model_config
        self.device = target_worker.device
        self.update_weights_from_tensor = target_worker.update_weights_from_tensor
        self.update_weights_from_ipc = lambda _: (True, "The target has them, the draft its own.")
        block_size = server_args.speculative_num_draft_tokens
        rows, allocator = target_worker.get_memory_pool()
        # FlashInfer plans a forward on the host, by the exact lengths.
        self._drafts_by_host = server_args.speculative_draft_attention_backend == "flashinfer"
        self._verifies_by_host = verify_backend(server_args) == "flashinfer"
        window = None
        if (size := server_args.speculative_draft_window_size) is not None:
            page_size, exact = server_args.page_size, self._drafts_by_host
            window = DraftWindow(rows, size, block_size, page_size, exact)
        draft_rows = window.rows if window else rows
        if self.model_runner.kv_cache_dtype != self.model_runner.dtype:
            raise Refusal(
                f"The target keeps its KV in {self.model_runner.kv_cache_dtype}, as its checkpoint "
                "asks, and this release keeps it in the model's dtype: use another checkpoint, or "
                "serve it without --speculative-algorithm DFLASH."
            )
        self.draft_worker = _draft_worker(server_args, target_worker, draft_rows, **place)
        self.draft_model_runner = runner = self.draft_worker.model_runner
        reserved = reserved_tokens(server_args)
        self.slots = Slots(rows, allocator, reserved)
        self._draw = TargetDraw(self.model_runner.sampler)
        widths = verify_widths(server_args)
        self._widths = Widths(self.model_runner, widths)
        self.verifier = Verifier(target_worker, self._draw, self._widths)
        self.context_kv = ContextKV(runner.model, runner.token_to_kv_pool)
        counted = server_args.enable_metrics and place["tp_rank"] == 0
        counters = StepCounters(block_size) if counted else None
        self.committer = Committer(block_size, widths != (block_size,), counters)
        use_graphs(self.model_runner, runner)
        prefills = self.model_runner.piecewise_cuda_graph_runner
        if isinstance(prefills, PiecewiseCudaGraphRunner):
            # What is captured hands out hidden states; only the runner does not know.
            prefills.capture_hidden_mode = CaptureHiddenMode.FULL
        self._block_size, self._width = block_size, widths[-1]
        self._at = torch.arange(block_size, device=self.device)
        self._drafts_ahead = draft_ahead(server_args)
        self.best_widths = None
        if len(widths) > 1:
            self.best_widths = BestWidths(self._rehearse, widths, self.model_runner, runner)
        self.drafter = Drafter(runner, self.slots, window, self.best_widths)
        _keep_block_in_pool(target_worker, reserved)
        if place["tp_rank"] == 0:
            target = "/".join(sorted(set(server_args.get_attention_backends())))
            draft, own = runner.model.dflash, runner.server_args.attention_backend
            logger.info(
                f"sglang-dflash {__version__}: draft={server_args.speculative_draft_model_path} "
                f"format={draft.format} block_size={block_size} layers={draft.num_layers} "
                f"target_layer_ids={list(draft.target_layer_ids)} "
                f"attention(target={target}, draft={own}) tp={server_args.tp_size}"
            )

    @torch.no_grad()
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """One prefill, or one decode step.

        Not in inference mode: SGLang's buffers outlive a call and are written outside of it too,
        and its graphs of prefills were compiled without.
        """
        return self._extend(batch) if batch.forward_mode.is_extend() else self._decode(batch)

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """One step: propose, verify, commit."""
        state: DFlashState = batch.spec_info
        self.slots.reserve(batch.reqs)
        lens = batch.seq_lens, batch.seq_lens_cpu
        block = state.block or self.drafter.propose(batch, state.anchors, *lens)
        best, rows = self.best_widths, batch.req_pool_indices
        part = best.to_verify(block, rows) if best else block.first(self._width)
        verified = self.verifier.verify(batch, part)
        packed, copied = to_host(verified.accepted.packed)
        self._write_accepted(verified)
        if self._drafts_ahead and batch.return_hidden_states:
            # The draft's graph may write where the graph of a narrower verify left them.
            verified.output.hidden_states = verified.output.hidden_states.clone()
        if self._drafts_by_host:
            copied.synchronize()
            following = self._draft_next(batch, verified, packed[:, -1] + 1)
        else:
            following = self._draft_next(batch, verified, part.draft_token_num)
            copied.synchronize()
        batch.spec_info = DFlashState(verified.accepted.bonus, following)
        if best is not None:
            best.observe(packed[:, -1].numpy())
        return self.committer.commit(batch, verified, packed.tolist())

    def _write_accepted(self, verified: Verified) -> None:
        """Context KV of the committed tokens: the anchor and the accepted drafts."""
        block, num_accepted = verified.block, verified.accepted.num_accepted
        written = verified.output.hidden_states, block.positions, block.out_cache_loc
        if block.slots.is_cuda:  # how many they are stays unknown to the host
            self.context_kv.write(*written, num_accepted)
        else:
            kept = block.rows(self._at[: block.draft_token_num] <= num_accepted[:, None])
            at = kept.nonzero().squeeze(1)
            self.context_kv.write(*(rows[at] for rows in written))

    def _draft_next(
        self, batch: ScheduleBatch, verified: Verified, grown: Tensor | int
    ) -> DFlashBlock | None:
        """The block behind what a step commits.

        grown: how much that is, [B] int64 on the host, or as much as it may be.
        Only a request that ends in this step can come past the context length.
        """
        if not self._drafts_ahead:
            return None
        most, width = self.model_config.context_len, verified.block.draft_token_num
        anchors, lens = verified.accepted.bonus, verified.accepted.lens
        bound = (batch.seq_lens_cpu + grown).clamp(max=most)
        block = self.drafter.propose(batch, anchors, lens, bound)
        best = self.best_widths
        narrower = width < self._block_size or (best and best.can_gain(len(anchors)))
        if not (narrower or self._verifies_by_host):
            self.verifier.plan(batch.req_pool_indices, block, lens, bound)
        return block

    def _extend(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Prefill: the target's own forward and draw, then the context KV of every new token.

        The host waits for the first tokens alone, so that they leave while the draft still runs.
        """
        self.verifier.forget()
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        forward_batch = ForwardBatch.init_new(batch, self.model_runner)
        result = self.target_worker.forward_batch_generation(None, forward_batch, is_verify=True)
        output = result.logits_output
        anchors = self._draw(output.next_token_logits, batch, batch.seq_lens - 1, block=None)
        if batch.return_logprob:
            attach_after_prefill(self.model_runner.sampler, batch, output, anchors)
        first, copied = to_host(anchors)
        positions = forward_batch.positions.long()
        self.context_kv.write(output.hidden_states, positions, batch.out_cache_loc)
        if batch.return_hidden_states:
            append_prompt_states(batch, output.hidden_states)
        output.hidden_states = None
        batch.spec_info = DFlashState(anchors)
        if self.best_widths is not None:
            self.best_widths.forget(batch.req_pool_indices)
        whole = not batch.is_prefill_only and all(r.inflight_middle_chunks <= 0 for r in batch.reqs)
        if self._drafts_ahead and whole and batch.check_decode_mem():
            self.slots.reserve(batch.reqs)
            lens = batch.seq_lens, batch.seq_lens_cpu
            batch.spec_info.block = self.drafter.propose(batch, anchors, *lens)
        copied.synchronize()
        # No tensor, which SGLang would merge with those of running batches, on the device.
        batch.input_ids, result.next_token_ids = anchors, first.numpy()
        return result

    def _rehearse(self, batch: int, width: int, draft: bool) -> None:
        """The draft's forward, or the target's and the context KV of it, without requests."""
        if draft:
            width = max(1, width - self.draft_model_runner.model.dflash.sample_from_anchor)
        seen = self.server_args.speculative_draft_window_size or 256
        length = min(seen, 256, self.model_config.context_len - self._block_size)
        lens_cpu = torch.full((batch,), length)
        lens, rows = lens_cpu.to(self.device), torch.arange(batch, device=self.device)
        slots = rows.new_zeros(batch, width)
        block = DFlashBlock(slots, block_positions(lens, self._at[:width]), slots)
        forward = block.forward_batch(rows, lens, lens_cpu)
        if draft:
            block.capture_hidden_mode = forward.capture_hidden_mode = CaptureHiddenMode.NULL
            self.draft_model_runner.forward(forward)
        else:
            self._widths.use(width)
            if self.model_runner.model_is_mrope:
                forward.mrope_positions = forward.positions.expand(3, -1)
            output = self.model_runner.forward(forward).logits_output
            self.context_kv.write(output.hidden_states, block.positions, block.out_cache_loc)
        torch.get_device_module(self.device).synchronize()

    def clear_cache_pool(self) -> None:
        """Nothing to clear: slots and rows are the target's, and stale draft KV is never read."""

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        """The request names the target's new weights; the draft keeps its own."""
        self.verifier.forget()
        self._widths.use(self._block_size)  # the one whose graphs SGLang captures anew, if asked to
        done = self.target_worker.update_weights_from_disk(recv_req)
        if recv_req.recapture_cuda_graph:
            self._widths.make()
        return done


def _draft_worker(
    server_args: ServerArgs, target: TpModelWorker, rows: ReqToTokenPool, **place: int | None
) -> TpModelWorker:
    """A TP worker of the draft on these rows and the target's allocator, graphs captured last.

    The draft's forward reads the target's embedding and LM head, which are bound only once both
    models exist; so its graphs are captured after that, not inside the constructor.
    """
    config = target.model_config
    args = draft_server_args(server_args, config.context_len, config.dtype)
    saved = get_global_server_args()
    try:
        worker = TpModelWorker(
            server_args=args,
            pp_rank=0,
            is_draft_worker=True,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=target.model_runner.token_to_kv_pool_allocator,
            memory_pool_config=target.model_runner.memory_pool_config,
            **place,
        )
        weigh = len(verify_widths(server_args)) > 1
        worker.model_runner.model.bind(target.model_runner.model, weigh)
        args.disable_cuda_graph = server_args.disable_cuda_graph
        worker.model_runner.init_device_graphs()
    finally:
        set_global_server_args_for_scheduler(saved)
    return worker


def _keep_block_in_pool(target: TpModelWorker, reserved: int) -> None:
    """Bound request lengths so that what the longest one reserves still fits the KV pool."""
    room = longest(target.max_total_num_tokens, reserved, target.server_args.page_size)
    if room < target.max_req_len:
        logger.info("Longest request: %d tokens, so that a block fits behind it.", room)
        target.max_req_len, target.max_req_input_len = room, room - 5
