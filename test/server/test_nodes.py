"""A server over two nodes (`--nnodes 2`), which are both this machine, and the end of a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests

from sglang_dflash.tools.launch import Server
from test.differential.ask import compare
from test.fleet import ends, family, two_nodes
from test.server.test_differential import COMPARED, check
from test.servers import ALL_FEATURES, Client

SECONDS = 30  # on a busy machine; 6 on an idle one, of which SGLang sleeps 5
WATCHDOG = 8  # seconds
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Client, Server]]:
    with two_nodes(*ALL_FEATURES) as both:
        yield both
        for node in (both[0].server, both[1]):
            assert node.alive, node.tail()


def test_random_requests(nodes: tuple[Client, Server], reference: Client) -> None:
    server, second = nodes
    check(compare(15, range(COMPARED), reference.url, server.url), COMPARED)
    assert requests.get(f"{second.url}/health", timeout=10).status_code == 200


def until_it_fails(server: Client, prompt: str) -> bool:
    """Ask again and again, each time for a complete answer or an error."""
    while True:
        try:
            answer = server.generate(prompt, max_new_tokens=200, ignore_eos=True)
        except (requests.RequestException, AssertionError):
            return True
        assert len(answer["output_ids"]) == 200


def schedulers(server: Server) -> list[psutil.Process]:
    return [each for each in family(server) if "scheduler" in "".join(each.cmdline())]


Victims = Callable[[Server, Server], list[psutil.Process]]
DEATHS: dict[str, Victims] = {
    "the first node": lambda first, _: family(first),
    "the second node": lambda _, second: family(second),
    "a scheduler": lambda _, second: schedulers(second),
}


@pytest.mark.parametrize("death", DEATHS)
def test_the_end_of_a_node_ends_the_other(death: str) -> None:
    """With one line in its log, and an error for each request that runs."""
    with ThreadPoolExecutor(1) as pool, two_nodes() as (server, second):
        both = server.server, second
        asked = pool.submit(until_it_fails, server, "def main(")
        everything = [process for node in both for process in family(node)]
        time.sleep(1)  # requests run
        for process in DEATHS[death](*both):
            process.kill()
        assert ends(both, everything, SECONDS)
        assert asked.result(SECONDS)
        log = both[death == "the first node"].tail()  # of the node that is left
        assert "Another rank of this server is gone" in log
        assert "Traceback" not in log


def test_a_node_that_does_not_answer_ends_the_other() -> None:
    """As a machine without power or network: nothing closes its connections."""
    flags = "--watchdog-timeout", str(WATCHDOG)
    with ThreadPoolExecutor(1) as pool, two_nodes(*flags) as (server, second):
        asked = pool.submit(until_it_fails, server, "def main(")
        time.sleep(1)  # requests run
        for process in family(second):
            process.suspend()
        assert ends([server.server], family(server.server), 2 * WATCHDOG + SECONDS)
        assert asked.result(SECONDS)
        assert "watchdog timeout" in server.server.log.read_text()
