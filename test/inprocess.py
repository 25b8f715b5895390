"""A real SGLang scheduler inside the test process, stepped by the test.

Nothing is mocked: scheduler, radix cache, pools, workers and models are SGLang's and ours. Only the
event loop is the test's own, so that it can look between steps and set an accept pattern.
"""

from __future__ import annotations

import gc
import itertools
import os
from array import array
from typing import Any

import torch
import torch._dynamo
import zmq

from test import releases

if releases.OWN_STEP and not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch._dynamo.config.disable = True  # it may be imported before, and read the variable then

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.distributed import parallel_state
from sglang.srt.eplb import expert_location
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
from sglang.srt.model_executor import input_buffers
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_dflash.seam.flags import attention_tp_size
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.tools.launch import free_port

_ids = itertools.count()


# Collections of what an engine leaves need not look at a million objects of modules.
gc.freeze()


def _forget_engine() -> None:
    """What SGLang keeps for the whole process, which has one engine elsewhere."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    expert_location._global_expert_location_metadata = None
    input_buffers._forward_input_buffer_pool.clear()
    gc.collect()


class InProcess:
    """Use as a context manager: SGLang holds its process groups in globals.

    With `tp_size`, every rank is a process of its own that builds one of these with its `tp_rank`
    and the `nccl_port` of all, and does what the others do.
    """

    def __init__(
        self,
        model_path: str,
        draft_path: str | None = None,
        tp_rank: int = 0,
        nccl_port: int | None = None,
        **args: Any,
    ) -> None:
        args.setdefault("dtype", "float32")
        args.setdefault("max_total_tokens", 4096)
        args.setdefault("max_running_requests", 8)
        args.setdefault("random_seed", 1)
        args.setdefault("mem_fraction_static", 0.95)
        args.setdefault("log_level", "warning")
        if draft_path is not None:
            args |= {
                "speculative_algorithm": "DFLASH",
                "speculative_draft_model_path": draft_path,
            }
        args.setdefault("disable_overlap_schedule", True)
        self.server_args = ServerArgs(model_path=model_path, **args)
        self.server_args.check_lora_server_args()  # `launch_server` calls it; it reads the adapters
        with temporarily(self.server_args, enable_dp_attention=False):  # else for several machines
            ports = PortArgs.init_new(self.server_args)
        ports.nccl_port = nccl_port or free_port()
        self._sinks = zmq.Context()  # where a server's other processes would listen
        for name in (ports.tokenizer_ipc_name, ports.detokenizer_ipc_name):
            self._sinks.socket(zmq.PULL).bind(name)
        replica = None
        if self.server_args.enable_dp_attention:
            replica = tp_rank // attention_tp_size(self.server_args)
        ranks = (0, tp_rank, 0, 0, 0, 0, replica)
        configure_scheduler_process(self.server_args, *ranks)
        try:
            self.scheduler = Scheduler(self.server_args, ports, *ranks)
        except BaseException:
            for context in [o for o in gc.get_objects() if isinstance(o, zmq.Context)]:
                context.destroy(linger=0)
            _forget_engine()
            raise
        self.worker = self.scheduler.draft_worker
        self.allocator = self.scheduler.token_to_kv_pool_allocator
        self.rows = self.scheduler.req_to_token_pool

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        # Its thread would hold the scheduler, and all weights, as long as the process lasts.
        watchdog = self.scheduler.watchdog
        watchdog.is_active, watchdog.dump_info = (lambda: False), None
        watchdog.get_counter = lambda: 0
        inbox = self.scheduler.ipc_channels.recv_from_tokenizer
        if isinstance(inbox, zmq.Socket):  # rank 0's
            inbox.context.destroy(linger=0)
        self._sinks.destroy(linger=0)
        self.scheduler = self.worker = self.allocator = self.rows = None
        _forget_engine()

    def add(self, input_ids: list[int], eos: int | None = None, **options: Any) -> Req:
        """Hand a request to the scheduler as its HTTP side would; returns its Req.

        `eos` is a token that ends this request as the model's own end token does.
        """
        fields = {
            name: options.pop(name)
            for name in list(options)
            if name in TokenizedGenerateReqInput.__dataclass_fields__
        }
        options.setdefault("temperature", 0.0)
        options.setdefault("max_new_tokens", 32)
        params = SamplingParams(**options)
        params.normalize(self.scheduler.tokenizer)
        params.verify(self.scheduler.model_config.vocab_size)
        rid = fields.pop("rid", None) or f"test-{next(_ids)}"
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", input_ids),
            mm_inputs=fields.pop("mm_inputs", None),
            sampling_params=params,
            return_logprob=fields.pop("return_logprob", False),
            logprob_start_len=fields.pop("logprob_start_len", -1),
            top_logprobs_num=fields.pop("top_logprobs_num", 0),
            token_ids_logprob=fields.pop("token_ids_logprob", None),
            stream=False,
            **fields,
        )
        self.scheduler.process_input_requests([request])
        queues = (self.scheduler.waiting_queue, self.scheduler.grammar_manager.grammar_queue)
        req = next(req for queue in queues for req in queue if req.rid == rid)
        if eos is not None:
            req.eos_token_ids = {eos}
        return req

    def abort(self, req: Req) -> None:
        self.scheduler.process_input_requests([AbortReq(rid=req.rid)])

    def step(self) -> bool:
        """One turn of the scheduler's own loop; False when it found nothing to run."""
        scheduler = self.scheduler
        if scheduler.grammar_manager.has_waiting_grammars():
            scheduler.waiting_queue.extend(scheduler.grammar_manager.get_ready_grammar_requests())
        batch = scheduler.get_next_batch_to_run()
        scheduler.cur_batch = batch
        if batch:
            with torch.no_grad():  # as the scheduler's own loop
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        scheduler.invariant_checker.self_check_during_busy()
        return bool(batch)

    def run(self, *reqs: Req, limit: int = 2000) -> None:
        """Step until these requests are finished, then until idle (which checks for leaks)."""
        for _ in range(limit):
            if not self.step() and all(req.finished() for req in reqs):
                return
        raise AssertionError(f"not finished in {limit} steps: {[r.rid for r in reqs]}")

    def generate(self, input_ids: list[int], **options: Any) -> list[int]:
        """The output of one request alone."""
        req = self.add(input_ids, **options)
        self.run(req)
        return list(req.output_ids_through_stop)
