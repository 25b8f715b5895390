"""Log probabilities of committed tokens, in SGLang's own fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from torch import Tensor

from sglang_dflash.runtime.draw import log_probabilities


def attach_after_prefill(
    sampler: Sampler, batch: ScheduleBatch, output: LogitsProcessorOutput, ids: Tensor
) -> None:
    """Set the first token's log probabilities on the output. ids: [B] int64."""
    info = batch.sampling_info
    logprobs = log_probabilities(output.next_token_logits, info.temperatures, info.top_ks <= 1)
    sampler._attach_logprobs_to_output(
        output, logprobs, batch.top_logprobs_nums, batch.token_ids_logprobs, info, ids
    )


def append_committed(
    batch: ScheduleBatch, logits: Sequence[Tensor], tokens: list[list[int]]
) -> None:
    """Append the log probabilities of each request's committed tokens.

    logits: of each request [w, V] as the draw saw them; tokens: what it took, from its row 0 on.
    """
    wanted = [(i, req, tokens[i]) for i, req in enumerate(batch.reqs) if req.return_logprob]
    rows = torch.cat([logits[i][: len(row)] for i, _, row in wanted])
    info, device = batch.sampling_info, rows.device
    whose = torch.tensor([i for i, _, row in wanted for _ in row], device=device)
    logprobs = log_probabilities(rows, info.temperatures[whose], info.top_ks[whose] <= 1)
    flat = torch.tensor([t for *_, row in wanted for t in row], device=device)
    values = logprobs.gather(1, flat[:, None]).squeeze(1).tolist()
    top = max(req.logprob.top_logprobs_num for _, req, _ in wanted)
    top_values, top_ids = ([], []) if top == 0 else (t.tolist() for t in logprobs.topk(top))
    start = 0
    for _, req, row in wanted:
        here, out = slice(start, start + len(row)), req.logprob
        start += len(row)
        out.output_token_logprobs_val.extend(values[here])
        out.output_token_logprobs_idx.extend(row)
        if (most := out.top_logprobs_num) > 0:
            out.output_top_logprobs_val.extend(v[:most] for v in top_values[here])
            out.output_top_logprobs_idx.extend(i[:most] for i in top_ids[here])
        if (named := out.token_ids_logprob) is not None:
            out.output_token_ids_logprobs_val.extend(logprobs[here, named].tolist())
            out.output_token_ids_logprobs_idx.extend([named] * len(row))
