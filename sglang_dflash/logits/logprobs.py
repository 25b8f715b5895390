"""Log probabilities of committed tokens, in SGLang's own fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB, Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from torch import Tensor


def log_probabilities(logits: Tensor, temperatures: Tensor, greedy: Tensor) -> Tensor:
    """Log probabilities as SGLang reports them, [n, V].

    logits: [n, V], with the logit rules applied; temperatures: [n, 1]; greedy: [n] bool. A sampled
    token has the log of its rounded probability.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if not SGLANG_RETURN_ORIGINAL_LOGPROB and not bool(greedy.all()):
        sampled = torch.softmax(logits / temperatures, dim=-1).log()
        logprobs = torch.where(greedy[:, None], logprobs, sampled)
    return logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)


class SGLangLogprobs:
    """Log probabilities in the fields of SGLang's requests, which its reports read."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def after_prefill(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, ids: Tensor
    ) -> None:
        info = batch.sampling_info
        logprobs = log_probabilities(output.next_token_logits, info.temperatures, info.top_ks <= 1)
        self._sampler._attach_logprobs_to_output(
            output, logprobs, batch.top_logprobs_nums, batch.token_ids_logprobs, info, ids
        )

    def after_verify(
        self, batch: ScheduleBatch, logits: Sequence[Tensor], tokens: list[list[int]]
    ) -> None:
        wanted = [i for i, req in enumerate(batch.reqs) if req.return_logprob]
        rows = torch.cat([logits[i][: len(tokens[i])] for i in wanted])  # [T, V]
        info, device = batch.sampling_info, rows.device
        whose = torch.tensor([i for i in wanted for _ in tokens[i]], device=device)  # [T]
        ids = torch.tensor([token for i in wanted for token in tokens[i]], device=device)  # [T]
        logprobs = log_probabilities(rows, info.temperatures[whose], info.top_ks[whose] <= 1)
        values = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
        most = max(batch.reqs[i].logprob.top_logprobs_num for i in wanted)
        top_values, top_ids = _top(logprobs, most)
        end = 0
        for i in wanted:
            start, end = end, end + len(tokens[i])
            req = batch.reqs[i]
            req.logprob.output_token_logprobs_val.extend(values[start:end])
            req.logprob.output_token_logprobs_idx.extend(tokens[i])
            _append_top(req, top_values[start:end], top_ids[start:end])
            _append_named(req, logprobs[start:end])


def _top(logprobs: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """The largest log probabilities and their ids, a list per token; empty if `count` is 0."""
    if count == 0:
        return [], []
    values, ids = logprobs.topk(count)
    return values.tolist(), ids.tolist()


def _append_top(req: Req, values: list[list[float]], ids: list[list[int]]) -> None:
    """Append as many of the largest as the request asks for, a list per token."""
    count = req.logprob.top_logprobs_num
    if count == 0:
        return
    for token_values, token_ids in zip(values, ids, strict=True):
        req.logprob.output_top_logprobs_val.append(token_values[:count])
        req.logprob.output_top_logprobs_idx.append(token_ids[:count])


def _append_named(req: Req, logprobs: Tensor) -> None:
    """Append the values of the tokens that the request names. logprobs: [n, V]."""
    named = req.logprob.token_ids_logprob
    if named is None:
        return
    req.logprob.output_token_ids_logprobs_val.extend(logprobs[:, named].tolist())
    req.logprob.output_token_ids_logprobs_idx.extend([named] * len(logprobs))
