"""A real browser shows the blocks of a real server, and so does a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import free_port
from sglang_dflash.watch.page import PAGE
from test.server.browsers import SECONDS, TOKENS, Page, needs_browser
from test.server.conftest import on
from test.servers import TWO_RANKS, Client, chat

QUESTION = held_out("word", 1, seed=41)[0].prompt
COMMAND = (sys.executable, "-m", "sglang_dflash")


@pytest.fixture(scope="module")
def expected(reference: Client) -> dict[str, Any]:
    """The target's answer without speculation, its end token included."""
    return reference.generate(
        chat(QUESTION), max_new_tokens=TOKENS, no_stop_trim=True, skip_special_tokens=False
    )


@contextmanager
def watching(*command: str) -> Iterator[str]:
    """The address of the page that a process serves and prints."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


@needs_browser
@on("auto")
def test_the_page_of_a_server(
    server: Client, expected: dict[str, Any], browser: webdriver.Chrome
) -> None:
    """The answer is the target's, and its tokens and blocks add up."""
    page = Page(browser, server.url + PAGE)
    page.ask(QUESTION)
    said = page.wait_for(r"tokens in \d+ steps")
    assert page.text("answer") == expected["text"]
    tokens, steps = map(int, re.findall(r"\d+", said)[:2])
    assert tokens == len(expected["output_ids"])
    assert len(page.all("#answer .draft")) + len(page.all("#answer .own")) == tokens
    assert page.number("count") == steps == len(page.all("#steps li"))
    assert page.number("length") == pytest.approx((tokens - 1) / steps, abs=0.01)
    assert page.number("with") > 0
    assert 1 <= page.number("width") <= 16
    summaries = [item.text.split("\n")[0] for item in page.all("#steps li")]
    for number, summary in enumerate(reversed(summaries), start=1):
        assert re.fullmatch(
            rf"Step {number}: 15 drafted, \d+ verified, \d+ accepted, then .*\.", summary
        )
    accepted = [int(re.findall(r"(\d+) accepted", summary)[0]) for summary in summaries]
    assert sum(accepted) == len(page.all("#answer .draft"))
    shares = [row.text for row in page.all("#positions tr")]
    assert len(shares) == 15
    assert shares[0].startswith(f"1 {sum(n >= 1 for n in accepted)} of {steps}")
    assert "sglang-dflash" in page.text("served")
    assert page.errors() == []


@needs_browser
@on("auto")
def test_the_page_loads_nothing_from_elsewhere(server: Client, browser: webdriver.Chrome) -> None:
    page = Page(browser, server.url + PAGE)
    page.ask(QUESTION, 8)
    page.wait_for("tokens in")
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert loaded
    assert all(url.startswith(server.url) for url in loaded)


@needs_browser
@on("auto")
def test_the_page_for_all_users(server: Client, browser: webdriver.Chrome) -> None:
    """Each control has a name, blocks have sentences, and the keyboard reaches everything."""
    page = Page(browser, server.url + PAGE)
    page.ask(QUESTION, 24)
    page.wait_for("tokens in")
    controls = page.all("textarea, input, button, [tabindex]")
    assert all(control.accessible_name for control in controls)
    assert page.browser.find_element(By.ID, "status").aria_role == "status"
    # A screen reader gets the sentence of a step, and not its chips one by one.
    assert page.all("#steps li .block:not([aria-hidden=true])") == []
    page.browser.find_element(By.ID, "prompt").click()
    reached = set()
    for _ in range(12):
        reached.add(browser.switch_to.active_element.get_attribute("id"))
        browser.switch_to.active_element.send_keys(Keys.TAB)
    wanted = {"prompt", "tokens", "temperature", "chat", "thinking", "send", "answer", "steps"}
    assert wanted <= reached


@needs_browser
@on("auto")
def test_an_answer_that_is_stopped(server: Client, browser: webdriver.Chrome) -> None:
    page = Page(browser, server.url + PAGE)
    browser.find_element(By.ID, "chat").click()  # a raw prompt: Python source goes on for long
    page.ask(held_out("code", 1)[0].prompt, 4000)
    WebDriverWait(browser, SECONDS).until(lambda _: page.all("#steps li"))
    browser.find_element(By.ID, "stop").click()
    page.wait_for("Stopped")
    server.flush()  # waits until no request runs


@needs_browser
@on("auto")
def test_the_page_of_another_server(server: Client, browser: webdriver.Chrome) -> None:
    """`sglang-dflash watch` of any server: the page is of another origin."""
    with watching("-m", "sglang_dflash", "watch", server.url, "--port", str(free_port())) as url:
        page = Page(browser, url)
        page.ask(QUESTION, 8)
        page.wait_for(r"tokens in \d+ steps")
        assert page.errors() == []


COMPARED = "import sys; from sglang_dflash.watch.page import page, serve; "
COMPARED += "serve(page([sys.argv[1]], *sys.argv[2:]), port=0)"


@needs_browser
@on("auto")
def test_the_page_compares_with_no_speculation(
    server: Client, reference: Client, expected: dict[str, Any], browser: webdriver.Chrome
) -> None:
    """As `sglang-dflash watch` does without a URL, here with servers that run already."""
    with watching("-c", COMPARED, server.url, reference.url) as url:
        page = Page(browser, url)
        page.ask(QUESTION)
        said = page.wait_for("times as fast")
        assert page.text("answer") == expected["text"]
        ratio = float(re.findall(r"([\d.]+) times", said)[0])
        assert ratio == pytest.approx(page.number("with") / page.number("without"), rel=0.1)
        assert page.text("without-name") == "Tokens a second without speculation"
        assert page.errors() == []


@needs_browser
@on("auto")
def test_the_page_of_several_servers(
    server: Client, reference: Client, expected: dict[str, Any], browser: webdriver.Chrome
) -> None:
    """One that does not serve DFLASH does not hide the others."""
    with watching("-m", "sglang_dflash", "watch", reference.url, server.url) as url:
        page = Page(browser, url)
        WebDriverWait(browser, SECONDS).until(lambda _: len(page.all("#place option")) == 2)
        assert page.text("served") == "This server does not answer as a DFLASH server."
        page.choose(server.url)
        assert "sglang-dflash" in page.text("served")
        page.ask(QUESTION)
        page.wait_for(r"tokens in \d+ steps")
        assert page.text("answer") == expected["text"]
        assert page.errors() == []


@on("auto")
def test_steps_in_an_answer(server: Client) -> None:
    """Only a request that asks gets its steps, and they add up to its tokens."""
    asked = {"return_logprob": True, "max_new_tokens": TOKENS}
    plain = server.generate(chat(QUESTION), **asked)
    watched = server.generate(chat(QUESTION), **asked, custom_params={"spec_steps": True})
    assert watched["output_ids"] == plain["output_ids"]
    assert "spec_steps" not in plain["meta_info"]
    steps = watched["meta_info"]["spec_steps"]
    assert [step["number"] for step in steps] == list(range(len(steps)))
    assert len(steps) == watched["meta_info"]["spec_verify_ct"]
    assert 1 + sum(step["num_committed"] for step in steps) == len(watched["output_ids"])
    place = 1  # behind the token of the prefill
    for step in steps:
        assert len(step["drafts"]) == len(step["draft_texts"]) == 15
        assert len(step["texts"]) == step["num_committed"]
        assert step["place"] == place
        accepted = step["drafts"][: step["num_accepted"]]
        assert accepted == watched["output_ids"][place : place + step["num_accepted"]]
        assert step["num_accepted"] <= step["num_verified"] <= 15
        place += step["num_committed"]
    assert_text(watched)
    times = [step["seconds"] for step in steps]
    assert times == sorted(times)


def assert_text(answer: dict[str, Any]) -> None:
    """The texts of the steps are those of the answer."""
    steps = answer["meta_info"]["spec_steps"]
    shown = "".join(step["text_before"] + "".join(step["texts"]) for step in steps)
    assert shown.removesuffix("<|im_end|>") == answer["text"]


@on(TWO_RANKS)
def test_steps_of_requests_that_are_retracted(server: Client) -> None:
    """After a retraction, a token of the answer belongs to a prefill and to no step."""
    prompts = [example.prompt for example in held_out("code", 12, seed=44)]
    watched = {"return_logprob": True, "custom_params": {"spec_steps": True}}
    options = {"max_new_tokens": 90, "ignore_eos": True, **watched}
    answers = server.generate_many(prompts, **options)
    retractions = [answer["meta_info"]["num_retractions"] for answer in answers]
    assert any(retractions), retractions
    for answer, times in zip(answers, retractions, strict=True):
        assert_text(answer)
        committed = sum(step["num_committed"] for step in answer["meta_info"]["spec_steps"])
        assert committed + 1 <= len(answer["output_ids"]) <= committed + 1 + times


@on("auto")
def test_watched_requests_in_company(server: Client) -> None:
    """Requests of a batch that nobody watches are answered as ever."""
    prompts = [chat(example.prompt) for example in held_out("word", 6, seed=43)]
    alone = [server.generate(prompt)["output_ids"] for prompt in prompts]

    def ask(i: int) -> dict[str, Any]:
        if i % 2 == 0:
            return server.generate(prompts[i])
        custom = {"spec_steps": True}
        return server.generate(prompts[i], return_logprob=True, custom_params=custom)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    assert [answer["output_ids"] for answer in answers] == alone
    assert ["spec_steps" in answer["meta_info"] for answer in answers] == [False, True] * 3


@on("auto")
def test_chat_in_a_terminal(server: Client, expected: dict[str, Any]) -> None:
    """Two turns. Accepted drafts have colours, and the text is the target's."""
    done = subprocess.run(
        [*COMMAND, "chat", server.url, "--max-tokens", str(TOKENS)],
        input=f"{QUESTION}\n\n{QUESTION}\n",
        capture_output=True,
        text=True,
        env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"},
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    coloured = re.findall(r"\x1b\[38;5;\d+m", done.stdout)
    assert len(coloured) > 10
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    assert expected["text"].removesuffix("<|im_end|>") in plain
    assert "<|im_end|>" not in plain
    assert len(re.findall(r"tokens in \d+ steps: [\d.]+ tokens a step", plain)) == 2


def test_chat_with_nobody() -> None:
    done = subprocess.run(
        [*COMMAND, "chat", f"http://127.0.0.1:{free_port()}"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_with_another_algorithm(reference: Client) -> None:
    done = subprocess.run([*COMMAND, "chat", reference.url], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--speculative-algorithm DFLASH" in done.stderr
    assert requests.get(reference.url + PAGE, timeout=30).status_code == 404
