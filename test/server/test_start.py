"""How a server starts, refuses to start, and ends: real processes, the bundled pair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest
import requests
from sglang.srt.server_args import ServerArgs

from sglang_dflash import __version__
from sglang_dflash.engine import plugin
from sglang_dflash.errors import Refusal
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import LAUNCH, Server, free_port
from test import inprocess  # loads the plugins
from test.plugins import distribution
from test.servers import DFLASH, Client, chat, running, with_forks

assert inprocess

PAIR = ["--model-path", str(TARGET), *DFLASH]
PROMPTS = [chat(example.prompt) for example in held_out("word", 3, seed=21)]
STARTED = f"sglang-dflash {__version__}: draft={DRAFT} "
KV = 26_624  # bytes of KV a token of the bundled pair in fp32, target 20,480 and draft 6,144


def clean_environment(**additions: str) -> dict[str, str]:
    """This process's environment without anything that steers SGLang; one OpenMP thread stays."""
    steering = ("SGLANG", "TORCH", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return kept | additions


@pytest.fixture(scope="module")
def expected(reference: Client) -> list[list[int]]:
    return [reference.generate(prompt)["output_ids"] for prompt in PROMPTS]


@pytest.mark.ci
def test_sglang_serve(expected: list[list[int]]) -> None:
    """Our worker answers, with no further flag and no environment variable; KV is bounded."""
    unset = [f"--unset={name}" for name in set(os.environ) - set(clean_environment())]
    sglang = ["env", *unset, str(Path(sys.executable).with_name("sglang")), "serve"]
    with Server([*PAIR, "--dtype", "float32"], command=sglang) as server:
        client = Client(server)
        assert [client.generate(prompt)["output_ids"] for prompt in PROMPTS] == expected
        info = requests.get(f"{server.url}/server_info", timeout=30).json()
        log = server.log.read_text()
    assert not server.log.exists()
    assert STARTED in log
    tokens = 2 * 10**9 // KV
    assert f"CPU: --max-total-tokens {tokens} (at most 2 GB of KV)" in log
    assert info["max_total_num_tokens"] == tokens
    served = info["sglang_dflash"]
    assert served["version"] == __version__
    assert (served["verify_width"], served["draft_ahead"]) == ("auto", "off")
    [line] = [line for line in log.splitlines() if STARTED in line]
    assert "verify_width=auto draft_ahead=off" in line


ENGINE = """
    import json
    import sglang

    if __name__ == "__main__":
        engine = sglang.Engine(
            model_path={target!r},
            dtype="float32",
            speculative_algorithm="DFLASH",
            speculative_draft_model_path={draft!r},
            log_level="info",
            nccl_port={port},
        )
        parameters = {{"temperature": 0, "max_new_tokens": 64}}
        answers = engine.generate({prompts!r}, parameters)
        engine.shutdown()
        print(json.dumps([answer["output_ids"] for answer in answers]))
"""


@pytest.mark.full
def test_engine(expected: list[list[int]], tmp_path: Path) -> None:
    """`sglang.Engine` runs our worker in a script that knows nothing of us."""
    script = tmp_path / "engine.py"
    given = {"target": str(TARGET), "draft": str(DRAFT), "prompts": PROMPTS, "port": free_port()}
    script.write_text(dedent(ENGINE).format(**given))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert STARTED in done.stderr + done.stdout


WHOSE = """
    import json
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from types import SimpleNamespace
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    arguments = SimpleNamespace(disable_overlap_schedule=True)
    sources = {source.plugin_name for hooks in HookRegistry._hooks.values() for *_, source in hooks}
    worker = SpeculativeAlgorithm.DFLASH.create_worker(arguments)
    judge = speculative_hook.handle_speculative_decoding
    while hasattr(judge, "__wrapped__"):
        judge = judge.__wrapped__
    ours = sorted(name for name in sources if name.startswith("dflash"))
    print(json.dumps([worker.__module__, judge.__module__, ours]))
"""


@pytest.mark.parametrize(
    ("whitelist", "worker", "judge", "sources"),
    [
        pytest.param(
            "",
            "sglang_dflash.engine.v0_5_13.build",
            "sglang_dflash.engine.plugin",
            ["dflash", "dflash_cpu", "dflash_guard"],
            id="all",
            marks=pytest.mark.full,  # every server of ours shows it
        ),
        pytest.param(
            "dflash_cpu",
            "sglang.srt.speculative.dflash_worker",
            "sglang.srt.arg_groups.speculative_hook",
            ["dflash_cpu"],
            id="dflash_cpu",
        ),
    ],
)
def test_whitelist_gives_the_built_in_back(
    whitelist: str, worker: str, judge: str, sources: list[str]
) -> None:
    """SGLANG_PLUGINS without dflash: SGLang's own worker, and none of our hooks on DFLASH."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(WHOSE)],
        capture_output=True,
        text=True,
        env=clean_environment(SGLANG_PLUGINS=whitelist),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [worker, judge, sources]


# A function of SGLang that is called for DFLASH alone, gone as after a renaming.
RENAMED = """
    def plugin():
        from sglang.srt.arg_groups import speculative_hook

        del speculative_hook._handle_dflash
"""


@pytest.fixture(scope="module")
def breakages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Environments in which DFLASH cannot be served, by what the refusal has to name."""
    folder = tmp_path_factory.mktemp("distributions")
    renamed = str(distribution(folder, "renamed", "1.0", RENAMED))
    another = str(distribution(folder, "sglang", "0.5.14"))
    return {
        "no hook on arg_groups.speculative_hook._handle_dflash": {"PYTHONPATH": renamed},
        "SGLang is 0.5.14, this release serves 0.5.13.post1 and 0.5.23": {"PYTHONPATH": another},
        "all": {"PYTHONPATH": f"{renamed}:{another}"},
    }


@pytest.mark.full  # test_refusals.py checks the reasons
@pytest.mark.parametrize("why", ["no hook on", "SGLang is"])
def test_half_a_plugin_refuses_dflash(breakages: dict[str, dict[str, str]], why: str) -> None:
    """One line that says why, and a status that is not 0: never the built-in in our name."""
    [(named, environment)] = [item for item in breakages.items() if item[0].startswith(why)]
    done = subprocess.run(
        [*LAUNCH, *PAIR],
        capture_output=True,
        text=True,
        env=clean_environment(**environment),
        timeout=300,
    )
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("sglang-dflash: ")]
    assert ours == done.stderr.splitlines()[-1:]
    assert named in ours[0]


@pytest.mark.full  # test_refusals.py asks the same of the arguments
def test_half_a_plugin_refuses_nothing_else(
    breakages: dict[str, dict[str, str]], expected: list[list[int]]
) -> None:
    """The same machine, broken in two ways, serves the target without speculation."""
    with running(dflash=False, environment=breakages["all"]) as client:
        assert client.generate(PROMPTS[0])["output_ids"] == expected[0]


def test_half_a_plugin_leaves_other_algorithms_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our guard refuses DFLASH alone. SGLang's own check then refuses NGRAM on a CPU."""
    monkeypatch.setattr(plugin, "missing_parts", lambda: ["no hook on it"])
    arguments = {"model_path": str(TARGET), "device": "cpu"}
    with pytest.raises(Refusal, match="no hook on it"):
        ServerArgs(speculative_algorithm="DFLASH", **arguments)
    with pytest.raises(ValueError, match="only supports CUDA"):
        ServerArgs(speculative_algorithm="NGRAM", **arguments)


LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "bytes, both pools": ({"dflash": True}, 2 * 10**9 // KV),
    "bytes, no draft": ({}, 2 * 10**9 // 20_480),
    "bytes, bf16": ({"dtype": "bfloat16", "dflash": True}, 2 * 10**9 // (KV // 2)),
    "requests": ({"max_running_requests": 3, "dflash": True}, 3 * 16_384),
    "requests, context": ({"max_running_requests": 3, "context_length": 1000}, 3000),
    "whole pages": ({"max_running_requests": 3, "context_length": 1000, "page_size": 256}, 2816),
    "asked for": ({"max_total_tokens": 777, "max_running_requests": 3, "dflash": True}, 777),
}


@pytest.mark.parametrize("case", LIMITS)
def test_default_size_of_the_kv_pools(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """On CPU min(SGLang's value, requests x context length, 2 GB), and a line in the log."""
    given, wanted = LIMITS[case]
    given = {"dtype": "float32", **given}
    if given.pop("dflash", False):
        given |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFT)}
    with caplog.at_level("INFO"):
        assert ServerArgs(model_path=str(TARGET), **given).max_total_tokens == wanted
    said = f"CPU: --max-total-tokens {wanted} (at most 2 GB of KV); give the flag to change it."
    assert (said in caplog.messages) == (case != "asked for")


class Demo:
    """`sglang-dflash demo`, and every process that it has ever had."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "sglang_dflash.tools.cli", "demo"]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A background job of a shell, such as this test may be, ignores SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.family = {psutil.Process(self.process.pid)}

    def watch(self, seconds: float, until: int | None = None) -> None:
        """Note its processes until it has ended, or until `until` of them have been seen."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))
            if until is not None and len(self.family) >= until:
                return
            time.sleep(0.05 if until else 0.5)  # a look takes a while, too

    @property
    def leftover(self) -> list[psutil.Process]:
        left: list[psutil.Process] = psutil.wait_procs(self.family, timeout=5)[1]
        return left


@contextmanager
def started(environment: dict[str, str]) -> Iterator[Demo]:
    demo = Demo(environment)
    try:
        yield demo
    finally:
        for process in demo.leftover:
            process.kill()


@pytest.fixture
def demo() -> Iterator[Demo]:
    with started(clean_environment()) as demo:
        yield demo


@pytest.fixture
def forking_demo(tmp_path: Path) -> Iterator[Demo]:
    """A demo whose servers start sooner."""
    with started(with_forks(clean_environment(), str(tmp_path))) as demo:
        yield demo


@pytest.mark.ci
def test_demo(forking_demo: Demo) -> None:
    """A line of JSON at the end, every answer the target's own, no process left."""
    demo = forking_demo
    demo.watch(900)
    out, err = demo.process.communicate(timeout=10)
    assert demo.process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert list(result) == [
        "identical", "prompts", "near_ties", "accept_length", "tok_s", "speedup"
    ]  # fmt: skip
    assert (result["identical"], result["prompts"], result["near_ties"]) == (True, 8, 0)
    assert result["accept_length"] >= 4
    assert set(result["tok_s"]) == {"none", "dflash"}
    assert len(demo.family) > 6  # two servers of three processes each
    assert demo.leftover == []


@pytest.mark.ci
@pytest.mark.parametrize(
    "how",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)],
    ids=lambda s: s.name,
)
def test_interrupted_demo_leaves_nothing(demo: Demo, how: signal.Signals) -> None:
    """Ended while a server starts: the server's processes, and so its ports, are gone too."""
    demo.watch(300, until=4)
    demo.process.send_signal(how)
    demo.watch(60)
    assert demo.process.poll() not in (None, 0)
    assert len(demo.family) >= 4
    assert demo.leftover == []
