"""Commit: requests, lengths and context KV take over what was accepted."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from torch import Tensor

from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.runtime.state import DFlashState
from sglang_dflash.runtime.verifier import Verified


def append_until_finished(req: Req, tokens: list[int]) -> int:
    """Give a request its committed tokens one by one, as plain decoding would.

    Stops behind the token that finishes it; returns how many were taken, at least 1.
    """
    for taken, token in enumerate(tokens, start=1):
        req.output_ids.append(token)
        req.update_finish_state()
        if req.finished():
            break
        if req.grammar is not None:
            req.grammar.accept_token(token)
    return taken


class Committer:
    def __init__(self, context_kv: ContextKV) -> None:
        self._context_kv = context_kv

    def commit(self, batch: ScheduleBatch, verified: Verified) -> GenerationBatchResult:
        # All rows of a block are written: those behind the accepted ones lie in slots that the next
        # block overwrites before anything reads them.
        self._context_kv.write(
            verified.features, verified.block.positions, verified.block.slots.flatten()
        )
        packed = torch.cat([verified.target_ids, verified.num_accepted[:, None]], dim=1)
        taken = self._commit_requests(batch, packed.tolist())
        self._advance(batch, verified.num_accepted + 1, taken)
        batch.spec_info = DFlashState(verified.bonus)
        accepted = [count - 1 for count in taken]
        verified.logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=verified.bonus,
            num_correct_drafts=sum(accepted),
            num_correct_drafts_per_req_cpu=accepted,
            can_run_cuda_graph=verified.can_run_cuda_graph,
        )

    def _commit_requests(self, batch: ScheduleBatch, packed: list[list[int]]) -> list[int]:
        """packed: a row a request, its draws and then num_accepted. Returns tokens taken."""
        counts = []
        for req, row in zip(batch.reqs, packed, strict=True):
            taken = append_until_finished(req, row[: row[-1] + 1])
            req.kv_committed_len += taken
            req.decode_batch_idx += 1
            req.spec_verify_ct += 1
            req.spec_num_correct_drafts += taken - 1
            req.update_spec_correct_drafts_histogram(taken - 1)
            counts.append(taken)
        return counts

    def _advance(self, batch: ScheduleBatch, lens: Tensor, taken: list[int]) -> None:
        """Advance all lengths in new tensors. lens: [B] int64 on device.

        Device and host differ only for requests that finished inside their accepted tokens, and
        those rows leave the batch before the next step.
        """
        batch.seq_lens = batch.seq_lens + lens
        batch.orig_seq_lens = batch.orig_seq_lens + lens.to(batch.orig_seq_lens.dtype)
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor(taken)
        batch.seq_lens_sum = None
