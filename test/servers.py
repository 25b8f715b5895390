"""Real servers over real HTTP: the bundled pair in fp32, on 127.0.0.1."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tools.launch import Server
from test import releases
from test.adapters import write_adapter
from test.forked import ForkedServer
from test.plugins import distribution
from training.families import assemble

STRICT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_DFLASH_VERIFY_WIDTH": releases.VERIFY_WIDTH,
}
COMMON = (
    *("--model-path", str(TARGET)),
    *("--dtype", "float32"),
    "--sleep-on-idle",
    *("--random-seed", "1"),
    *("--max-total-tokens", "16384"),
    *("--max-running-requests", "8"),
    *("--cuda-graph-max-bs", "32"),
)
# With overlap SGLang counts penalties a token late, and the prompt's last token as output.
REFERENCE = ("--disable-overlap-schedule",)
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFT))
FULL = ("--speculative-dflash-verify-width", "full")  # for tests that count accepted drafts
MANY = ("--max-running-requests", "32")  # more step times to measure: a slower start
ADAPTERS = {"wide": 16, "narrow": 4}  # names and ranks
AHEAD = ("--speculative-dflash-draft-ahead", "on")
# Every feature that a request may ask for. Seeds count, so unseeded draws are all alike.
ALL_FEATURES = (
    *MANY,
    "--enable-deterministic-inference",
    "--enable-custom-logit-processor",
    "--enable-return-hidden-states",
    *("--tool-call-parser", "qwen25"),
    # A grammar that allows blanks without end is given blanks without end by the bundled target.
    "--constrained-json-disable-any-whitespace",
)
# SGLang applies penalties in the order of a set of classes, which changes from process to process.
# A DFLASH server adds before it scales, and so does the reference with this plugin. And a parser of
# calls finds other text in two tokens at once, which SGLang gives it where its HTTP process is
# late. With this plugin, a stream has taken a token before the next one comes.
REFERENCE_PLUGIN = """
    def plugin():
        import asyncio
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def ordered(orchestrator, vocab_size, batch, penalizers):
            by_name = sorted(penalizers, key=lambda penalizer: penalizer.__name__)
            return (orchestrator, vocab_size, batch, by_name), {}

        orchestrator = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator"
        HookRegistry.register(f"{orchestrator}.__init__", ordered, HookType.BEFORE)

        async def until_taken(original, manager, tokens):
            states = [manager.rid_to_state.get(rid) for rid in tokens.rids]
            await original(manager, tokens)
            for _ in range(10_000):  # a client that is gone takes nothing
                if not any(state.out_list for state in states if state and state.obj.stream):
                    break
                await asyncio.sleep(0)

        manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
        HookRegistry.register(f"{manager}._handle_batch_output", until_taken, HookType.AROUND)
"""
# A process that SGLang spawns imports SGLang anew, most of a server's start. A fork has it already.
# What users start spawns: `test_sglang_serve` does so, too. Further processes for HTTP are spawned
# here, too: a fork of the first one would have its metrics. And the controller of replicas does
# nothing but look for messages, which takes all of a core.
FORKED = """
    def plugin():
        import multiprocessing
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def start_by(method):
            return lambda *_, **__: multiprocessing.set_start_method(method, force=True)

        engine = "sglang.srt.entrypoints.engine"
        configured = f"{engine}._set_envs_and_config"
        HookRegistry.register(configured, start_by("fork"), HookType.AFTER)
        launched = f"{engine}.Engine._launch_subprocesses"
        HookRegistry.register(launched, start_by("spawn"), HookType.AFTER)

        def wait_for_messages(controller):
            feed, inbox = controller.soft_watchdog.feed, controller.recv_from_tokenizer
            controller.soft_watchdog.feed = lambda: (inbox.poll(100), feed())

        controller = "sglang.srt.managers.data_parallel_controller.DataParallelController"
        HookRegistry.register(f"{controller}.event_loop", wait_for_messages, HookType.BEFORE)
"""


ANY_ROWS = "DFLASH_TEST_ANY_ROWS"  # a seed: each step verifies any rows of its batch
CUT = """
    def plugin():
        import os
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def cut(_, scheduler):
            from test.cuts import verify_any_rows

            verify_any_rows(scheduler.draft_worker, int(os.environ["DFLASH_TEST_ANY_ROWS"]))

        if "DFLASH_TEST_ANY_ROWS" in os.environ:
            target = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
            HookRegistry.register(target, cut, HookType.AFTER)
"""


@dataclass(frozen=True)
class Setup:
    """How a server that tests share is started."""

    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    dflash: bool = True
    family: str | None = None  # of the draft; None: the bundled DFlash draft
    mark: str | None = None  # "ci" or "full": the sets that have its tests


PAGE_16 = ("--page-size", "16", "--chunked-prefill-size", "32")
SMALL_POOL = (*MANY, "--max-total-tokens", "1024", "--schedule-conservativeness", "0.01")
COUNTED = ("--enable-metrics", "--enable-priority-scheduling")
SHORT_WAIT = ("--max-running-requests", "1"), {"SGLANG_REQ_WAITING_TIMEOUT": "0.2"}
SHORT_RUN = (), {"SGLANG_REQ_RUNNING_TIMEOUT": "2"}
TWO_RANKS = "two ranks, small pool"
SERVERS = {  # by the name that tests give
    "auto": Setup(ALL_FEATURES),
    "page 16, ahead": Setup(
        (*ALL_FEATURES, *FULL, *AHEAD, *PAGE_16, *releases.RANKS),
        family=releases.FAMILY,
        mark="ci",
    ),
    TWO_RANKS: Setup(("--tp", "2", "--page-size", "4", *SMALL_POOL, *COUNTED), family="dflash2"),
    "page 1": Setup(FULL, mark="full"),
    "page 256, no radix": Setup(
        (*FULL, "--page-size", "256", "--disable-radix-cache"), mark="full", family="domino"
    ),
    "chunks of 4": Setup((*FULL, "--chunked-prefill-size", "4"), mark="full"),
    "no tokenizer": Setup(("--skip-tokenizer-init",), mark="full"),
    "short wait": Setup(*SHORT_WAIT, mark="full"),
    "short run": Setup(*SHORT_RUN, mark="full"),
    "no speculation": Setup(ALL_FEATURES, dflash=False, mark="full"),
    "no speculation, short wait": Setup(*SHORT_WAIT, dflash=False, mark="full"),
    "no speculation, short run": Setup(*SHORT_RUN, dflash=False, mark="full"),
}
OUTSIDE_SAMPLING = {  # the fields of /generate that are no sampling parameters
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
    "rid",
    "session_params",
}


class Client:
    """A server and the native API."""

    def __init__(self, server: Server, flags: tuple[str, ...] = (), dflash: bool = True) -> None:
        self.server, self.url = server, server.url
        self.flags, self.dflash = flags, dflash

    def post(
        self, path: str, body: dict[str, Any] | None = None, seconds: int = 300
    ) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body or {}, timeout=seconds)

    def generate(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """Send one /generate request; `options` are its fields and its sampling parameters."""
        fields = {k: options.pop(k) for k in list(options) if k in OUTSIDE_SAMPLING}
        options.setdefault("temperature", 0)
        options.setdefault("max_new_tokens", 64)
        key = "text" if isinstance(prompt, str) else "input_ids"
        response = self.post("/generate", {key: prompt, "sampling_params": options, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, prompt: str, **sampling: Any) -> Iterator[dict[str, Any]]:
        """The growing answer to a /generate request. After the first one, the request runs."""
        body = {"text": prompt, "stream": True, "sampling_params": {"temperature": 0, **sampling}}
        url = f"{self.url}/generate"
        with requests.post(url, json=body, timeout=300, stream=True) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def generate_many(self, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def flush(self) -> None:
        assert self.post("/flush_cache?timeout=30").status_code == 200  # it waits until idle


@contextmanager
def running(
    *flags: str,
    dflash: bool,
    environment: dict[str, str] | None = None,
    family: str | None = None,
) -> Iterator[Client]:
    """A server that is alive when the block is left, or the error shows the end of its log.

    Of a server that is a fixture, `test/server/conftest.py` shows it: a fixture gets no exception.
    """
    arguments = releases.flags(*COMMON, *(DFLASH if dflash else REFERENCE), *flags)
    given = {**os.environ, **STRICT, **(environment or {})}
    with (
        TemporaryDirectory() as folder,
        ForkedServer([*arguments, *draft_of(family, folder)], with_forks(given, folder)) as server,
    ):
        try:
            yield Client(server, flags, dflash)
        except Exception as error:
            if not server.alive:
                raise AssertionError(server.tail(60)) from error
            raise
        assert server.alive, server.tail(60)
        assert "Scheduler hit an exception" not in server.log.read_text()


def with_forks(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment of a server that forks its processes. folder: gets the plugins."""
    plugins = {"forked": FORKED, "any_rows": CUT}
    paths = [str(distribution(Path(folder), name, "1.0", plugins[name])) for name in plugins]
    if "PYTHONPATH" in environment:
        paths.append(environment["PYTHONPATH"])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def draft_of(family: str | None, folder: str) -> tuple[str, ...]:
    """Flags for a draft of this family, which is written to a folder."""
    if family is None:
        return ()
    return "--speculative-draft-model-path", str(assemble(family, Path(folder)))


def with_adapters(folder: Path) -> tuple[str, ...]:
    """Flags for the LoRA adapters ADAPTERS of the bundled target, which are written to a folder."""
    for seed, (name, rank) in enumerate(ADAPTERS.items()):
        part = ("embed_tokens",) if seed == 0 else ()
        write_adapter(folder / name, TARGET, rank, part, seed, strength=0.02)
    return "--lora-paths", *(f"{name}={folder / name}" for name in ADAPTERS)


@contextmanager
def without_speculation(*flags: str) -> Iterator[Client]:
    """The same installation without --speculative-algorithm, with every feature."""
    with TemporaryDirectory() as folder:
        path = str(distribution(Path(folder), "reference", "1.0", REFERENCE_PLUGIN))
        environment = {"PYTHONPATH": path}
        with running(*ALL_FEATURES, *flags, dflash=False, environment=environment) as client:
            yield client


def chat(prompt: str) -> str:
    """The bundled target's chat format, one user turn."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
