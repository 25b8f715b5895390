"""Pairs of a prefill and a decode server that need flags of their own, and such as do not fit."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import free_port
from test.chaos.apart import MISSED, until
from test.chaos.disturb import child
from test.fleet import DECODE, OVER_TCP, PATIENCE, PREFILL, Pair, launched, prefill_and_decode
from test.plugins import distribution
from test.servers import FULL, SMALL_POOL, Client, chat, draft_of, running, without_speculation
from training import hybrid

pytestmark = pytest.mark.ci
LONG = {"max_new_tokens": 100, "ignore_eos": True}
RADIX = ("--disaggregation-decode-enable-radix-cache",)
RETRACTS = (*SMALL_POOL, "--num-reserved-decode-tokens", "8")
PROMPTS = [chat(example.prompt) for example in held_out("word", 8, seed=61)]


def test_retraction_on_the_decode_server() -> None:
    """A retracted request gets its KV back from the host, the draft's too; also in a window.

    It is never prefilled again, so a pause that would do so is refused.
    """
    flags = (*FULL, "--speculative-draft-window-size", "48", "--page-size", "4")
    decode = (*RETRACTS, *RADIX, "--tokenizer-worker-num", "2")
    with (
        running(*flags, dflash=True) as one,
        prefill_and_decode(*flags, decode=decode) as pair,
    ):
        assert pair.decode.post("/pause_generation", {"mode": "retract"}).status_code == 400
        asked = [(prompt, i) for i in range(2) for prompt in PROMPTS]
        expected = [one.generate(prompt, **LONG) for prompt in PROMPTS] * 2
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(lambda each: pair.generate(each[0], **LONG), asked))
        assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
        infos = [(a["meta_info"], e["meta_info"]) for a, e in zip(answers, expected, strict=True)]
        retracted = [(a, e) for a, e in infos if a["num_retractions"] > 0]
        assert retracted
        key = "spec_verify_ct"
        assert sum(a[key] for a, _ in retracted) <= 1.05 * sum(e[key] for _, e in retracted)
        pair.flush()


STOPPED = """
    def plugin():
        import os, pathlib, time
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        folder = pathlib.Path(os.environ["STOPPED"])

        def send(original, manager, session, slots, *args):
            if len(slots) > 500:
                (folder / "sending").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
            return original(manager, session, slots, *args)

        target = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache"
        HookRegistry.register(target, send, HookType.AROUND)
"""


def test_an_abort_while_kv_is_sent(tmp_path: Path) -> None:
    """Other requests get the slots when all has arrived. Here that takes four seconds."""
    path = str(distribution(tmp_path, "stopped", "1.0", STOPPED))
    environment = OVER_TCP | {"PYTHONPATH": path, "STOPPED": str(tmp_path)}
    decode = ("--max-total-tokens", "1650", "--num-reserved-decode-tokens", "8")
    sampling = {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True}
    long = {"text": "one " * 700, "sampling_params": sampling, "rid": "aborted"}
    with prefill_and_decode(*FULL, decode=decode, environment=environment) as pair:
        with ThreadPoolExecutor(8) as threads:
            known = list(threads.map(lambda p: pair.generate(p, **sampling), PROMPTS[:6]))
            running = [threads.submit(pair.generate, prompt, **sampling) for prompt in PROMPTS[:6]]
            time.sleep(0.7)
            aborted = threads.submit(pair.ask, long)
            until((tmp_path / "sending").exists)
            for server in (pair.decode, pair.prefill):
                assert server.post("/abort_request", {"rid": "aborted"}).status_code == 200
            time.sleep(4)
            (tmp_path / "go").touch()
            answers = [each.result() for each in running]
            ids = [answer["output_ids"] for answer in answers]
            assert ids == [answer["output_ids"] for answer in known]
            assert "Aborted" in aborted.result().text
        pair.flush()


COMPILING = """
    def plugin():
        import os, pathlib, time
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import get_global_server_args

        folder = pathlib.Path(os.environ["COMPILING"])

        def compile(original, *args):
            if get_global_server_args().disaggregation_mode == "prefill":
                (folder / "compiling").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
            return original(*args)

        target = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend"
        HookRegistry.register(f"{target}._init_value_dispatch", compile, HookType.AROUND)
"""


def test_a_request_that_only_one_server_ends(tmp_path: Path) -> None:
    """SGLang prefills another prompt then. The decode server does not go on from its KV."""
    path = str(distribution(tmp_path, "compiling", "1.0", COMPILING))
    environment = OVER_TCP | {"PYTHONPATH": path, "COMPILING": str(tmp_path)}
    small = ("--max-total-tokens", "400")
    sampling = {"temperature": 0, "max_new_tokens": 20, "regex": "(.|\\n)*"}
    with prefill_and_decode(*FULL, prefill=small, environment=environment) as pair:
        asked = {"text": PROMPTS[0], "sampling_params": sampling, "rid": "aborted"}
        with ThreadPoolExecutor(1) as threads:
            aborted = threads.submit(pair.ask, asked)
            until((tmp_path / "compiling").exists)
            assert pair.prefill.post("/abort_request", {"rid": "aborted"}).status_code == 200
        (tmp_path / "go").touch()
        too_long = {"text": "one " * 600, "sampling_params": {"max_new_tokens": 20}}
        for answer in (aborted.result(), pair.ask(too_long)):
            assert answer.status_code == 500, answer.text
            assert "KVTransferError" in answer.text
        refused = pair.ask(asked | {"sampling_params": {"regex": "("}})
        assert refused.status_code == 400
        assert "Failed to compile regex grammar" in refused.text
        pair.flush()
        assert pair.generate(PROMPTS[0], **sampling)["output_ids"]


@pytest.mark.parametrize(("dies", "title"), [("prefill", "scheduler"), ("decode", "main")])
def test_one_dies_and_is_started_again(dies: str, title: str) -> None:
    """Requests end with an error, the other server loses nothing, and both serve as before."""
    port = free_port()
    flags = {
        "prefill": (*PREFILL, "--disaggregation-bootstrap-port", str(port), *FULL),
        "decode": (*DECODE, *FULL),
    }
    lives = "decode" if dies == "prefill" else "prefill"
    environment = OVER_TCP | PATIENCE
    with launched(flags[lives], environment=environment) as (survivor,):
        servers = {lives: Client(survivor)}
        with launched(flags[dies], environment=environment) as (victim,):
            servers[dies] = Client(victim)
            pair = Pair(**servers, port=port)
            known = [pair.generate(prompt, **LONG)["output_ids"] for prompt in PROMPTS]
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                asked = [threads.submit(_answer_or_error, pair, prompt) for prompt in PROMPTS]
                time.sleep(0.5)
                main = psutil.Process(victim.pid)
                (main if title == "main" else child(servers[dies], title)).kill()
                answers = [each.result() for each in asked]
            for answer, ids in zip(answers, known, strict=True):
                assert answer is None or answer == ids
        if dies == "prefill":
            until(lambda: MISSED in survivor.log.read_text())
        with launched(flags[dies], environment=environment) as (again,):
            servers[dies] = Client(again)
            pair = Pair(**servers, port=port)
            assert [pair.generate(prompt, **LONG)["output_ids"] for prompt in PROMPTS] == known
            pair.flush()
            assert "Scheduler hit an exception" not in survivor.log.read_text()


def _answer_or_error(pair: Pair, prompt: str) -> list[int] | None:
    """None: an error, or the connection is gone."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, **LONG}}
    try:
        answer = pair.ask(body)
    except requests.ConnectionError:
        return None
    return answer.json()["output_ids"] if answer.status_code == 200 else None


def _by_position(answer: dict[str, Any]) -> list[int]:
    counts: list[int] = answer["meta_info"]["spec_accepted_per_position"]
    return counts


@pytest.fixture(scope="module")
def hybrid_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid.assemble(tmp_path_factory.mktemp("hybrid"))[0]


@pytest.mark.parametrize("page", ["1", pytest.param("64", marks=pytest.mark.full)])
def test_hybrid_targets(hybrid_target: Path, page: str) -> None:
    """Recurrent states travel with the KV."""
    flags = ("--model-path", str(hybrid_target), "--page-size", page)
    chunks = ("--chunked-prefill-size", "64", *(("--disable-radix-cache",) if page != "1" else ()))
    with without_speculation(*flags) as reference, running(*flags, *FULL, dflash=True) as one:
        expected = [reference.generate(prompt, **LONG)["output_ids"] for prompt in PROMPTS]
        together = [one.generate(prompt, **LONG) for prompt in PROMPTS]
    with prefill_and_decode(*flags, *FULL, prefill=chunks) as pair:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda p: pair.generate(p, **LONG), PROMPTS))
        assert [answer["output_ids"] for answer in answers] == expected
        assert [_by_position(answer) for answer in answers] == [_by_position(t) for t in together]
        pair.flush()


UNEQUAL = {
    "block size": ("--speculative-dflash-block-size", "8"),
    "page size": ("--page-size", "4"),
    "attention TP size": ("--tp", "2", "--tokenizer-worker-num", "2"),
    "draft": (),  # another one, which is written by the test
}


def test_servers_that_do_not_fit(tmp_path: Path) -> None:
    """The first request to a pair says what differs, with HTTP 500. Either serves others."""
    flags = {**UNEQUAL, "draft": draft_of("dspark", str(tmp_path))}
    fitting, *ports = (free_port() for _ in range(len(flags) + 2))
    prefills = [
        _prefill(port, *FULL, *flags[name]) for name, port in zip(flags, ports, strict=False)
    ]
    with ExitStack() as stack:
        for of_each, dflash in (
            ([_prefill(fitting, *FULL), (*DECODE, *FULL), *prefills], True),
            ([DECODE, _prefill(ports[-1])], False),
        ):
            launch = launched(*of_each, dflash=dflash, environment=OVER_TCP | PATIENCE)
            started = [Client(server) for server in stack.enter_context(launch)]
            if dflash:
                prefill, decode, *others = started
            else:
                plain_decode, plain_prefill = started
        for name, other, port in zip(flags, others, ports, strict=False):
            assert re.search(f"(?i){name}", _error(Pair(other, decode, port)))
        assert "no DFLASH draft" in _error(Pair(plain_prefill, decode, ports[-1]))
        assert "prefill instance" in _error(Pair(prefill, plain_decode, fitting))
        assert "Both must serve the same target" in prefill.server.log.read_text()
        others[0].server.stop()
        with launched(_prefill(ports[0], *FULL), environment=OVER_TCP) as (mended,):
            assert Pair(Client(mended), decode, ports[0]).generate(PROMPTS[0])
        pair = Pair(prefill, decode, fitting)
        assert len(pair.generate(PROMPTS[0])["output_ids"]) > 8
        pair.flush()


def _prefill(port: int, *flags: str) -> tuple[str, ...]:
    return (*PREFILL, "--disaggregation-bootstrap-port", str(port), *flags)


def _error(pair: Pair) -> str:
    """What the decode server says of a request that ends with an error, in time."""
    answer = pair.ask({"text": "def main("})
    assert answer.status_code == 500, answer.text
    return str(answer.json()["message"])
