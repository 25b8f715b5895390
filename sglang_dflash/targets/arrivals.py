"""Requests that reach a decode server with their KV: another server has prefilled them.

With `--disaggregation-mode`, the prefill server writes context KV and drafts nothing. SGLang sends
the draft's pool with the target's, the same slots. The decode server begins where a prefill ends:
with the first token, the noise of the request, and its first block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from torch import Tensor

from sglang_dflash.step.copies import HostCopy
from sglang_dflash.step.draft_ahead import DraftLater
from sglang_dflash.step.noise import Noise
from sglang_dflash.step.policies import NextDraft
from sglang_dflash.step.state import DFlashState


class WriteOnly(DraftLater):
    """The draft after a prefill whose request decodes elsewhere: none."""

    def after_prefill(self, batch: ScheduleBatch, anchors: Tensor) -> None:
        """Wait for the context KV. SGLang's threads read it as soon as the scheduler has tokens."""
        HostCopy(anchors).wait()


class Arrivals:
    """Gives a step what a prefill on this server would have left of a request, besides KV."""

    def __init__(
        self, pool: ReqToTokenPool, draft_kv: MHATokenToKVPool, noise: Noise, next_draft: NextDraft
    ) -> None:
        """pool: of the target; draft_kv: of the draft, with the same slots."""
        pool.dflash_arrivals = self
        self._table = pool.req_to_token
        self._draft_kv = draft_kv
        self._noise = noise
        self._next_draft = next_draft

    def state(self, batch: ScheduleBatch, anchors: Tensor) -> DFlashState:
        """The state of requests that begin to decode. anchors: [B] int64, their last tokens."""
        self._noise.begin(batch.reqs, batch.req_pool_indices)
        batch.input_ids = anchors  # as after a prefill; SGLang leaves those of the prompts
        return DFlashState(anchors, self._next_draft.after_prefill(batch, anchors))

    def take_out(self, req: Req) -> None:
        """Copy a retracted request's draft KV to the host."""
        req.dflash_kv = self._draft_kv.get_cpu_copy(self._slots(req))

    def put_back(self, req: Req) -> None:
        self._draft_kv.load_cpu_copy(req.dflash_kv, self._slots(req))
        del req.dflash_kv

    def _slots(self, req: Req) -> Tensor:
        """The slots of the committed tokens before the last: [n] int32."""
        slots: Tensor = self._table[req.req_pool_idx, : req.seqlen - 1]
        return slots


def state_of_arrivals(
    original: Callable[..., Any],
    algorithm: Any,
    batch: ScheduleBatch,
    server_args: Any,
    last_tokens: Tensor,
    future_map: Any,
) -> DFlashState:
    """AROUND `SpeculativeAlgorithm.build_disagg_draft_input`."""
    arrivals: Arrivals = batch.req_to_token_pool.dflash_arrivals
    return arrivals.state(batch, last_tokens)


def take_out(_: None, req: Req, req_to_token_pool: ReqToTokenPool, *__: Any) -> None:
    """AFTER `Req.offload_kv_cache`: a retracted request is not prefilled again."""
    req_to_token_pool.dflash_arrivals.take_out(req)


def put_back(_: None, req: Req, req_to_token_pool: ReqToTokenPool, *__: Any) -> None:
    """AFTER `Req.load_kv_cache`."""
    req_to_token_pool.dflash_arrivals.put_back(req)
