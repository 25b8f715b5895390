"""A request's drafts, step by step, and the draft's KV."""

from __future__ import annotations

import torch

from test.forced import Recorder, put_drafter
from test.inprocess import InProcess


def record(engine: InProcess) -> Recorder:
    recorder = Recorder(engine.worker.drafter)
    put_drafter(engine.worker, recorder)
    return recorder


def trace(engine: InProcess, ids: list[int], new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """For each step of a request: its output so far, and the block that is drafted behind it."""
    recorder = record(engine)
    req = engine.add(ids, max_new_tokens=new_tokens, ignore_eos=True)
    steps: list[tuple[list[int], list[int]]] = []
    while not req.finished():
        output = list(req.output_ids)
        engine.step()
        if len(recorder.blocks.get(req.rid, [])) > len(steps):
            steps.append((output, recorder.blocks[req.rid][-1]))
    assert steps
    return steps


def draft_kv(engine: InProcess, row: int, length: int) -> torch.Tensor:
    """Draft K and V of a row's first tokens, [2, layers, length, heads, D]."""
    pool = engine.worker.draft_model_runner.token_to_kv_pool
    slots = engine.rows.req_to_token[row, :length].long()
    return torch.stack(
        [torch.stack([b[slots] for b in buffers]) for buffers in (pool.k_buffer, pool.v_buffer)]
    )
