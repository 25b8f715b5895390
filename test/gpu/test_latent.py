"""Targets with latent attention (MLA) on a GPU, in the sizes that its kernels are built for."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from test.checkpoints import LAYERS, write_latent_pair
from test.forced import Forced, put_drafter
from test.gpu.conftest import ON_GPU, Margins, N, engine, part_only_at_near_ties, prompts

pytestmark = ON_GPU

SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 16}
LOGPROB = 0.15  # bf16 rounds differently in forwards of one row and of many; chosen
ASKED = N | {"max_new_tokens": 48, "return_logprob": True}


def alike(ours: Any, theirs: Any) -> int:
    """The tokens before two answers part, whose logprobs must be alike."""
    same = [a == b for a, b in zip(ours.output_ids, theirs.output_ids, strict=True)]
    count = [*same, False].index(False)
    values = [req.logprob.output_token_logprobs_val[:count] for req in (ours, theirs)]
    assert values[0] == pytest.approx(values[1], abs=LOGPROB)
    return count


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_answers(tmp_path: Path, backend: str, graphs: bool, experts: bool) -> None:
    """A random target. Drafts are forced, of which 0 to 7 are right."""
    dense = {} if experts else {"first_k_dense_replace": LAYERS}
    pair = write_latent_pair(tmp_path, head_dim=128, **SIZES, **dense)
    ids = prompts(5)
    flags: dict[str, Any] = {"attention_backend": backend, "disable_cuda_graph": not graphs}
    with engine(draft=False, pair=pair, **flags) as run:
        expected = [run.add(prompt, **ASKED) for prompt in ids]
        run.run(*expected)
    with engine(pair=pair, **flags) as run:
        counts = cycle([3, 0, 7, 1, 5])
        drafter = Forced(run.worker.drafter, lambda _: next(counts))
        put_drafter(run.worker, drafter)
        margins = Margins(run)
        reqs = [run.add(prompt, **ASKED) for prompt in ids]
        for req, truth in zip(reqs, expected, strict=True):
            drafter.truth[req.rid] = list(truth.output_ids)
        run.run(*reqs)
    part_only_at_near_ties(reqs, margins, [list(req.output_ids) for req in expected])
    compared = sum(alike(*two) for two in zip(reqs, expected, strict=True))
    assert compared > 60, compared  # of 240
    assert sum(req.spec_num_correct_drafts for req in reqs) > 30
