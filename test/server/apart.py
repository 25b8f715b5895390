"""A plugin that drives two ranks apart, as rounding can, and notes what each of them does."""

from __future__ import annotations

# Rank 1 holds, at every row of the target, another token one ulp above the winner, and in the draft
# the other neighbour of every hidden value. Both ranks note what they verify and what they commit.
APART = """
    import json, os
    from pathlib import Path


    def plugin():
        import torch
        from sglang.srt.distributed import get_tensor_model_parallel_rank as rank
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def note(kind, value):
            with (Path(os.environ["NOTES"]) / f"rank{rank()}").open("a") as file:
                print(json.dumps([kind, value]), file=file)

        def hidden(processor, states, *args, **kwargs):
            if rank() == 1:
                states = torch.nextafter(states, torch.full_like(states, torch.inf))
            return (processor, states, *args), kwargs

        def logits(result, *args, **kwargs):
            if rank() == 1:
                top, at = result.max(dim=-1, keepdim=True)
                above = torch.nextafter(top, torch.full_like(top, torch.inf))
                result.scatter_(1, (at + 1) % 2048, above)

        def blocks(worker, batch, *args, is_verify=False, **kwargs):
            if batch is not None and is_verify:
                note("blocks", batch.input_ids.tolist())

        def commits(result, scheduler, batch, *args, **kwargs):
            for req in batch.reqs:
                drafts = req.spec_verify_ct, req.spec_num_correct_drafts
                note("commit", [req.rid, list(req.output_ids), *drafts])

        processor = "sglang.srt.layers.logits_processor.LogitsProcessor"
        worker = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
        HookRegistry.register(f"{processor}._compute_lm_head", hidden, HookType.BEFORE)
        HookRegistry.register(f"{processor}._get_logits", logits, HookType.AFTER)
        HookRegistry.register(worker, blocks, HookType.BEFORE)
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", commits)
"""
