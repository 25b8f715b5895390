"""Lets SGLang's built-in DFLASH run on a CPU, and simulates accept lengths for it.

It does nothing unless `SGLANG_PLUGINS` names `dflash_builtin_bench` and leaves `dflash` out. Each
stand-in replaces a part of SGLang that does not run on a CPU, and computes the same in as few
operations as a CPU can. docs/benchmarks.md lists them.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def install() -> None:
    named = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")}
    if "dflash_builtin_bench" not in named or "dflash" in named:
        return
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(target: str, kind: HookType, function: Any) -> None:
        HookRegistry.register(f"sglang.srt.{target}", function, kind)

    if version("sglang") != "0.5.13.post1":  # SGLang's later workers run on this package's platform
        utils = "speculative.dflash_utils"
        hook("models.dflash.DFlashDraftModel.forward", HookType.AROUND, in_model_dtype)
        hook(f"{utils}.is_dflash_sampling_verify_available", HookType.REPLACE, lambda: True)
        sampled = f"{utils}.compute_dflash_sampling_correct_drafts_and_bonus"
        hook(sampled, HookType.AROUND, with_sampling_op)
        return
    if not torch.accelerator.is_available():
        hook("managers.tp_worker.TpModelWorker.__init__", HookType.BEFORE, draft_on_torch_native)
        hook("models.dflash.DFlashDraftModel.forward", HookType.AROUND, in_model_dtype)
        hook("speculative.spec_utils.assign_req_to_token_pool_func", HookType.REPLACE, assign_slots)
        hook(
            "speculative.dflash_utils.resolve_dflash_verify_mask_policy", HookType.REPLACE, no_mask
        )
        hook(
            "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            HookType.REPLACE,
            all_gather_into_tensor,
        )
    hook("speculative.dflash_info.DFlashVerifyInput.verify", HookType.AFTER, count_acceptance)
    if (accept_length := envs.SGLANG_SIMULATE_ACC_LEN.get()) > 0:
        logger.warning("SIMULATED ACCEPTANCE of %s tokens a step.", accept_length)
        simulated = SimulatedAcceptance(accept_length)
        hook("speculative.dflash_info.DFlashVerifyInput.verify", HookType.BEFORE, simulated.plan)
        hook(
            "speculative.dflash_utils.compute_dflash_correct_drafts_and_bonus",
            HookType.REPLACE,
            simulated.correct_drafts_and_bonus,
        )


def draft_on_torch_native(*args: Any, **kwargs: Any) -> None:
    """BEFORE `TpModelWorker.__init__`: set torch_native, which the list of backends lacks."""
    if kwargs.get("is_draft_worker"):
        kwargs["server_args"].attention_backend = "torch_native"  # the worker's own copy


def in_model_dtype(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `DFlashDraftModel.forward`: undo the cast of embeddings to bfloat16."""
    kwargs["input_embeds"] = kwargs["input_embeds"].to(model.norm.weight.dtype)
    return original(model, *args, **kwargs)


def with_sampling_op(original: Any, **given: Any) -> Any:
    """AROUND `compute_dflash_sampling_correct_drafts_and_bonus`, whose op is of CUDA."""
    from sglang.srt.speculative import dflash_utils

    ops: Any = dflash_utils
    ops._DFLASH_SAMPLING_VERIFY_AVAILABLE = True
    ops.tree_speculative_sampling_target_only = accept_chain
    ops.top_k_renorm_prob = ops.top_p_renorm_prob = None  # it has torch versions of these
    return original(**given)


def accept_chain(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    **_: Any,
) -> None:
    """In place of sgl_kernel's op, for a chain and thresholds of 1.

    candidates: [B, N]; uniform_samples: [B, N]; target_probs: [B, N, V]. A draft is accepted with
    the target's probability. The token after the last one is drawn without a rejected draft.
    """
    width = candidates.shape[1]
    for row, (tokens, probs) in enumerate(zip(candidates, target_probs, strict=True)):
        count = 0
        while count < width - 1:
            if uniform_samples[row, count] > probs[count, tokens[count + 1]]:
                break
            count += 1
        left = probs[count].clone()
        if count < width - 1:
            left[tokens[count + 1]] = 0
        total = left.cumsum(0)
        drawn = torch.searchsorted(total, uniform_samples_for_final_sampling[row] * total[-1])
        first = row * width
        predicts[first : first + count] = tokens[1 : count + 1]
        predicts[first + count] = drawn.clamp(max=len(left) - 1)
        accept_index[row, : count + 1] = torch.arange(first, first + count + 1)
        accept_token_num[row] = count


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """REPLACE `assign_req_to_token_pool_func`: row i, columns start[i] to end[i], in order.

    NumPy works on the same memory. For a few numbers, it takes a third of the time of torch.
    """
    rows, start, end, table, slots = (
        tensor.numpy()
        for tensor in (req_pool_indices, start_offset, end_offset, req_to_token, out_cache_loc)
    )
    lengths = end - start
    shift = start - (np.cumsum(lengths) - lengths)
    columns = np.arange(len(slots)) + np.repeat(shift, lengths)
    table[np.repeat(rows, lengths), columns] = slots


def no_mask(attn_backend: Any) -> tuple[str, bool]:
    """REPLACE `resolve_dflash_verify_mask_policy`: as with flashinfer and fa3, no mask is built."""
    return type(attn_backend).__name__, False


def all_gather_into_tensor(group: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE `GroupCoordinator.all_gather_into_tensor`: the registered op has no CPU kernel."""
    torch.distributed.all_gather_into_tensor(output, input, group=group.device_group)


def count_acceptance(result: Any, verify_input: Any, *, batch: Any, **_: Any) -> None:
    """AFTER `DFlashVerifyInput.verify`: fill in the histogram, as SGLang's other workers do."""
    for req, correct in zip(batch.reqs, result[-1], strict=True):
        req.update_spec_correct_drafts_histogram(correct)


class SimulatedAcceptance:
    """The same fixed sequence of accepted lengths as `DFlashWorker` uses."""

    def __init__(self, accept_length: float) -> None:
        self._accept_length = accept_length
        self._commits: list[int] = []  # of the batch being verified

    def plan(self, verify_input: Any, *, batch: Any, **_: Any) -> None:
        """BEFORE `DFlashVerifyInput.verify`."""
        from sglang_dflash.method.simulate import simulated_commit

        assert batch.sampling_info.is_all_greedy, "simulated acceptance needs temperature 0"
        self._commits = [
            simulated_commit(req.spec_verify_ct, self._accept_length, verify_input.draft_token_num)
            for req in batch.reqs
        ]

    def correct_drafts_and_bonus(
        self, *, candidates: Tensor, target_predict: Tensor
    ) -> tuple[Tensor, Tensor]:
        """REPLACE `compute_dflash_correct_drafts_and_bonus`; both inputs are [B, N]."""
        commits = torch.tensor(self._commits, device=target_predict.device)
        bonus = target_predict.gather(1, commits[:, None] - 1)[:, 0]
        return (commits - 1).int(), bonus.long()
