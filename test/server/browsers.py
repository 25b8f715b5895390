"""A real browser, and the page that shows blocks in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

SECONDS = 60
TOKENS = 64  # more than the answer of test_watch.py has
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    None in (BROWSER, DRIVER) and "CI" not in os.environ,
    reason="needs chromium and chromium-driver, packages of Debian",
)


@contextmanager
def started() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=str(DRIVER))
    with webdriver.Chrome(options, service) as browser:
        yield browser


class Page:
    """The page in a browser."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        self.errors()  # of the page before
        browser.get(url)

    def text(self, name: str) -> str:
        return str(self.browser.find_element(By.ID, name).get_property("textContent"))

    def number(self, name: str) -> float:
        return float(self.text(name))

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def ask(self, prompt: str, tokens: int = TOKENS) -> None:
        """Type a prompt and send it, with the keyboard alone."""
        field = self.browser.find_element(By.ID, "prompt")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(prompt, Keys.TAB, str(tokens))
        field.send_keys(Keys.CONTROL, Keys.ENTER)

    def choose(self, server: str) -> None:
        """Choose where to ask. There are several places."""
        Select(self.browser.find_element(By.ID, "place")).select_by_visible_text(server)

    def wait_for(self, status: str) -> str:
        """The status, when it matches this pattern."""

        def found(_: Any) -> str | None:
            said = self.text("status")
            assert "Failed" not in said, said
            return said if re.search(status, said) else None

        return str(WebDriverWait(self.browser, SECONDS).until(found))

    def errors(self) -> list[Any]:
        log: Any = self.browser
        return list(log.get_log("browser"))
