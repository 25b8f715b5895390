"""Prefill: the target's forward over prompts, the first token, the context KV of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from torch import Tensor

from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.step.copies import HostCopy
from sglang_dflash.step.noise import Noise
from sglang_dflash.step.policies import ContextObserver, Logprobs
from sglang_dflash.step.sample import SamplingInput, TargetSampler


@dataclass(frozen=True)
class PrefillResult:
    result: GenerationBatchResult
    anchors: Tensor  # [B] int64, the first tokens
    copy: HostCopy  # of the anchors


class Prefill:
    def __init__(
        self,
        target: TpModelWorker,
        sampler: TargetSampler,
        noise: Noise,
        logprobs: Logprobs,
        context_kv: ContextKV,
        observers: Sequence[ContextObserver],
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._noise = noise
        self._logprobs = logprobs
        self._context_kv = context_kv
        self._observers = observers
        self._runner = target.model_runner
        graphs = self._runner.piecewise_cuda_graph_runner
        if graphs is not None and not target.server_args.enable_breakable_cuda_graph:
            # The captured model returns hidden states. SGLang's runner assumes that it does not.
            graphs.capture_hidden_mode = CaptureHiddenMode.FULL

    def run(self, batch: ScheduleBatch) -> PrefillResult:
        """Run a prefill. The first tokens are copied before the context KV is queued."""
        self._noise.begin(batch.reqs, batch.req_pool_indices)
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        forward_batch = ForwardBatch.init_new(batch, self._runner)
        # Each layer waits until its KV has come from host memory. SGLang says so only with a batch.
        self._target.set_hicache_consumer(batch.hicache_consumer_index)
        result = self._target.forward_batch_generation(None, forward_batch, is_verify=True)
        output = result.logits_output
        asked = SamplingInput.of(batch, block=None)
        first = self._sampler(output.next_token_logits, asked, batch.seq_lens - 1)
        if batch.return_logprob:
            self._logprobs.after_prefill(batch, output, first)
        copy = HostCopy(first)
        count = len(batch.out_cache_loc)  # with DP attention, the forward has padding after these
        positions = forward_batch.positions[:count].long()
        output.hidden_states = output.hidden_states[:count]
        self._context_kv.write(output.hidden_states, positions, batch.out_cache_loc)
        if self._context_kv.keeps_last:
            last = forward_batch.extend_seq_lens.cumsum(0) - 1
            self._context_kv.keep_last(output.hidden_states, last, batch.req_pool_indices)
        for observer in self._observers:
            counts = forward_batch.extend_seq_lens
            starts = counts.cumsum(0) - counts
            observer.observe(batch.reqs, output.hidden_states, positions, starts, counts)
        if batch.return_hidden_states:
            _append_prompt_states(batch, output.hidden_states)
        output.hidden_states = None
        return PrefillResult(result, first, copy)


def all_start_to_decode(batch: ScheduleBatch) -> bool:
    """Whether all requests of a prefill start to decode after it."""
    if batch.is_prefill_only:
        return False
    return all(req.inflight_middle_chunks <= 0 for req in batch.reqs)


def _append_prompt_states(batch: ScheduleBatch, states: Tensor) -> None:
    """Append the last layer's states of each request's last chunk. states: [T, .. + H].

    SGLang itself takes a request's states from a wrong place. It computes the place as if all
    requests returned their states and no prefix were cached.
    """
    last_layer = states[:, -batch.model_config.hidden_size :]
    for req, chunk in zip(batch.reqs, last_layer.split(batch.extend_lens), strict=True):
        if req.return_hidden_states and req.inflight_middle_chunks <= 0:
            req.hidden_states.append(chunk.tolist())
