"""Replicas of a server (`--dp-size`): all are seen."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.watch.page import PAGE
from test.fleet import assert_each_counts_its_steps, described_replicas, steps_by_replica
from test.server.browsers import SECONDS, Page, needs_browser
from test.servers import Client, running

PROMPT = "def main(args):\n"
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    with running("--dp-size", "2", "--enable-metrics", dflash=True) as server:
        yield server


def test_the_server_describes_each(server: Client) -> None:
    """By its number, and the server by the first of them."""
    described = described_replicas(server)
    assert [each["dp_rank"] for each in described] == [0, 1]
    assert {each["block_size"] for each in described} == {16}


def test_metrics_count_each(server: Client) -> None:
    """Steps have the label of the replica that ran them."""
    assert_each_counts_its_steps(server)


@needs_browser
def test_the_page_asks_the_one_that_is_chosen(server: Client, browser: webdriver.Chrome) -> None:
    page = Page(browser, server.url + PAGE)
    WebDriverWait(browser, SECONDS).until(lambda _: len(page.all("#place option")) == 2)
    address = server.url.removeprefix("http://")
    for replica in ("0", "1"):
        before = steps_by_replica(server)
        page.choose(f"{address}, replica {replica}")
        page.ask(PROMPT, 20)
        page.wait_for(r"tokens in \d+ steps")
        assert "sglang-dflash" in page.text("served")
        after = steps_by_replica(server)
        assert {key for key in after if after[key] > before.get(key, 0)} == {replica}
    assert page.errors() == []


def test_a_terminal_names_the_replica_that_answers(server: Client) -> None:
    question = held_out("word", 1, seed=41)[0].prompt
    command = [sys.executable, "-m", "sglang_dflash", "chat", server.url]
    said = subprocess.run(
        command, input=f"{question}\n{question}\n", capture_output=True, text=True, timeout=300
    )
    assert said.returncode == 0, said.stderr
    assert "2 replicas" in " ".join(said.stdout.split())
    assert sorted(re.findall(r"Replica (\d): \d+ tokens in", said.stdout)) == ["0", "1"]
