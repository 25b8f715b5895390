"""`DFlashWorker`: SGLang's own worker drafts and verifies blocks, and this package decides.

SGLang's worker launches a step before the host has handled the one before. What it does with the
target's logits is replaced: each draft that equals the target's own draw is accepted, whatever
rules a request has. The draft, the context KV and the first token after a prefill are ours, too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor
from torch.nn import functional as F

from sglang_dflash.engine.draft_rules import check_loaded_head
from sglang_dflash.engine.v0_5_23.history import output_before_anchors
from sglang_dflash.engine.v0_5_23.report import keep_by_token, keep_drafts
from sglang_dflash.engine.v0_5_23.sampling import FirstTokenSampler, OwnPenalties, penalised
from sglang_dflash.kernels import Kernels
from sglang_dflash.kernels.first_launches import launch_draws
from sglang_dflash.logits.rules import RequestedRules
from sglang_dflash.method.block import Block
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.report.metrics import StepLog
from sglang_dflash.report.worker import Report
from sglang_dflash.seam.resolving import Arguments
from sglang_dflash.step.copies import to_device
from sglang_dflash.step.noise import Noise, is_sampled
from sglang_dflash.step.sample import SamplingInput, TargetSampler
from sglang_dflash.targets.kv_dtype import check_loaded_kv
from sglang_dflash.targets.lora import check_loaded_adapters
from sglang_dflash.trainer.features import FeatureFiles
from sglang_dflash.trainer.new_weights import NewWeights


class DFlashWorker(DFlashWorkerV2):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = Arguments(self.server_args)
        check_loaded_kv(arguments, self.model_runner)
        check_loaded_adapters(arguments, self.model_runner.model)
        check_loaded_head(arguments, self.model_runner.model)
        self._kernels = Kernels.on(self.device)
        self._rules = RequestedRules(all_ends=True)
        self.draft_model.bind(self.model_runner.model, self._kernels, False, self.block_size)
        dp_rank = get_parallel().dp_rank
        self._seed = f"{self._target_worker.random_seed} {dp_rank}"
        self._features: FeatureFiles | None = None
        if arguments.dflash.features is not None and self._target_tp_rank == 0:
            num_features = len(self.draft_model.dflash.target_layer_ids)
            self._features = FeatureFiles(
                arguments.dflash.features, num_features, self.model_runner.model
            )
        self.report = Report(
            arguments, self.draft_model_runner, arguments.dflash, clock=None, dp_rank=dp_rank
        )
        self.report.observers.append(StepLog(keep_by_token))
        if self._target_tp_rank == 0:
            self.report.begin()
        self._asked: SamplingInput  # of the step that runs; its block is not drafted yet
        self._candidates: Tensor  # of the same
        self._picks: Tensor | None = None  # of the same, if a request is sampled
        self._final_states: Tensor | None = None  # of the same, if a request wants hidden states
        self._returns_states = self._has_grammar = False  # of the same

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        runner, arguments = self.model_runner, Arguments(self.server_args)
        self._noise = Noise(
            len(runner.req_to_token_pool.req_to_token),
            self.device,
            self._kernels,
            arguments.enable_deterministic_inference,
            self._seed,
        )
        self._sampler = TargetSampler(self._noise, self._rules, self._kernels)
        runner.sampler = self._first = FirstTokenSampler(self._sampler)
        self.draft_model.keep(self._noise.table)
        pool = self.draft_model_runner.token_to_kv_pool
        queues_work = self.device != "cpu"
        self._context_kv = ContextKV(self.draft_model, pool, self._kernels, queues_work)
        runner.dflash_new_weights = NewWeights(self.draft_model, self._context_kv)

    def prewarm_sampling(self) -> Any:
        vocab_size, dtypes = self.model_config.vocab_size, [torch.float32]
        table = self._noise.table
        launch_draws(self._kernels, table, vocab_size, self.block_size, dtypes, ragged=False)
        return super().prewarm_sampling()

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one prefill or one decode step."""
        info = batch.sampling_info  # a copy for this step
        extend = batch.forward_mode.is_extend()
        self._returns_states = batch.return_hidden_states
        self._has_grammar = batch.has_grammar
        self._final_states = None
        self._asked = SamplingInput(
            batch.reqs,
            batch.req_pool_indices,
            info,
            block=None,
            penalised=penalised(batch.reqs),
            has_grammar=False,  # the logits are masked already
            output_of=_whole_output if extend else output_before_anchors(grammar_barrier),
        )
        if batch.return_logprob and info.is_any_greedy:  # SGLang scales these if others are sampled
            info.temperatures = info.temperatures.where(info.top_ks[:, None] > 1, 1.0)
        if extend:
            takes = [req.sampling_params.max_new_tokens > 0 for req in batch.reqs]
            if not all(takes):  # SGLang does not scale logits of which no token is drawn
                of_token = to_device(takes, info.temperatures.device, torch.bool)[:, None]
                info.temperatures = info.temperatures.where(of_token, 1.0)
            self._noise.begin(batch.reqs, batch.req_pool_indices)
            self._first.asked = self._asked
            info.acc_additive_penalties = info.acc_scaling_penalties = None
            info.penalizer_orchestrator = None
            if self._asked.penalised:
                info.penalizer_orchestrator = OwnPenalties(self._rules, self._asked)
        result: GenerationBatchResult = super().forward_batch_generation(
            batch, on_publish, grammar_barrier, pp_proxy_tensors
        )
        if not extend:
            keep_drafts(result, batch.reqs, self._candidates)
        if self._final_states is not None:
            rows = _rows_of_states(batch) if extend else slice(None)
            result.logits_output.hidden_states = self._final_states[rows]
        return result

    def _accept_block(
        self,
        *,
        candidates: Tensor,
        next_token_logits: Tensor,
        prefix_lens: Tensor,
        target_predict: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Accept the drafts that equal the target's own draws.

        candidates: [B, N] int64, column 0 is the anchor; next_token_logits: [B * N, V] float32;
        prefix_lens: [B] int64, tokens before the anchor; target_predict: [B * N] int64, the argmax
        if SGLang has it already. A greedy batch without rules is SGLang's own case.
        """
        self._candidates = candidates
        asked = self._asked
        alone = self._rules.one_token_a_step(replace(asked, has_grammar=self._has_grammar))
        if any(alone) or not self._sampler.is_argmax(asked):
            offsets = torch.arange(candidates.shape[1], device=candidates.device)
            positions = prefix_lens[:, None] + offsets
            block = Block(candidates, positions, slots=positions, picks=self._picks)
            asked = replace(asked, block=block)
            target_predict = self._sampler(next_token_logits, asked, positions.flatten())
            if any(alone):
                draws = target_predict.view_as(candidates)
                candidates = _not_acceptable(candidates, alone, draws, asked.info.vocab_size)
        result = super()._accept_block(
            candidates=candidates,
            next_token_logits=next_token_logits,
            prefix_lens=prefix_lens,
            target_predict=target_predict,
            **others,
        )
        if asked.block is not None and target_predict is not None:
            draws = target_predict.view_as(candidates)
            self._noise.learn(asked.reqs, asked.rows, asked.block, draws, result[0])
        return result

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: Tensor,
        cache_loc: Tensor,
        positions: Tensor,
        extend_lens: Tensor | None = None,
        commit_lens: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Write the context KV: of a prefill's tokens, or of a block's committed ones.

        target_hidden: [>= n, K * H_target], and with hidden states for answers the last layer's
        after them; cache_loc, positions: [n]; extend_lens, commit_lens: [B], one of them.
        """
        slots = cache_loc.long()
        if self._returns_states:
            size = self.draft_model.dflash.target_hidden_size
            self._final_states = target_hidden[: len(slots), -size:].clone()
        if commit_lens is not None:
            blocks = slots.view(len(commit_lens), -1)
            offsets = torch.arange(blocks.shape[1], device=slots.device)
            slots = torch.where(offsets < commit_lens[:, None], blocks, 0).flatten()
        self._context_kv.write(target_hidden[: len(slots)], positions.long(), slots)
        if self._context_kv.keeps_last or self._features is not None:
            self._observe(target_hidden, positions, extend_lens, commit_lens)

    def _observe(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        extend_lens: Tensor | None,
        commit_lens: Tensor | None,
    ) -> None:
        """Show the tokens that join the context to what looks at them."""
        if commit_lens is None:
            assert extend_lens is not None
            counts = extend_lens.long()
            starts = counts.cumsum(0) - counts
        else:
            counts = commit_lens
            starts = torch.arange(len(counts), device=counts.device) * self.block_size
        if self._context_kv.keeps_last:
            self._context_kv.keep_last(target_hidden, starts + counts - 1, self._asked.rows)
        if self._features is not None:
            self._features.observe(self._asked.reqs, target_hidden, positions, starts, counts)

    def weight_update_runners(self) -> list[Any]:
        """New weights are the target's. `weights.select_runners` names the draft."""
        return []

    def _can_skip_verify_logits(self, batch: ScheduleBatch, sampling_info: Any) -> bool:
        exposed = batch.has_grammar or batch.return_logprob
        return not exposed and self._sampler.is_argmax(self._asked)

    def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states: Tensor, **_: Any) -> Tensor:
        """The draft's forward has chosen the tokens: [B * (N - 1), C + 1] -> [B * (N - 1)].

        The others are kept: what each share of the noise would draft.
        """
        self._picks = None
        reqs = self._asked.reqs
        if any(map(is_sampled, reqs)):
            shares = hidden_states[:, :-1].unflatten(0, (len(reqs), -1)).permute(2, 0, 1)
            self._picks = F.pad(shares, (1, 0))  # a copy, with a place for the anchor
        return hidden_states[:, -1]

    def _maybe_build_draft_sampler(self) -> None:
        """The head is a part of the draft's forward."""

    def _maybe_merge_trained_mask_embedding(self) -> None:
        """The draft's forward embeds its masks."""

    def _cache_full_embed_weight(self) -> None:
        """The draft's forward embeds its tokens, and reads no embeddings of the worker.

        The worker looks them up all the same: in a table of one zero, of the draft's hidden size.
        The target's would cost an all-reduce, and may be of another size than the graph's buffer.
        """
        zero = torch.zeros(1, dtype=self.draft_model_runner.dtype, device=self.device)
        sizes = self.model_config.vocab_size, self.draft_model.dflash.hidden_size
        self._full_embed_gpu = zero.expand(*sizes)

    def _init_fused_kv_helper(self) -> None:
        """`ContextKV` writes context KV."""

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Draws of any kind are supported."""


def _not_acceptable(
    candidates: Tensor, alone: list[bool], draws: Tensor, vocab_size: int
) -> Tensor:
    """The candidates, with wrong drafts for requests that commit one token a step.

    candidates, draws: [B, N] int64; alone: [B], those requests. A draft is compared with the draw
    at the position before it. SGLang looks up the logprobs of rejected ones, too, so they are
    tokens of the vocabulary.
    """
    wrong = (draws.roll(1, dims=1) + 1) % vocab_size
    wrong[:, 0] = candidates[:, 0]
    requests = to_device(alone, candidates.device, torch.bool)
    return torch.where(requests[:, None], wrong, candidates)


def _rows_of_states(batch: ScheduleBatch) -> Any:
    """The tokens of a prefill whose hidden states SGLang expects: all, or each prompt's last."""
    mode = max(batch.return_hidden_states_mode, get_server_return_hidden_states_mode())
    if mode.is_full():
        return slice(None)
    return [end - 1 for end in accumulate(batch.extend_lens)]


def _whole_output(req: Any, start: int) -> list[int]:
    return list(req.output_ids[start:])
