"""Requests drawn from a server's own schema: none is an error of the server, and none ends it."""

from __future__ import annotations

import re
import time

import requests
from hypothesis import HealthCheck, Phase, given, settings

from test.server.bodies import Bodies, Case, cases
from test.servers import Client

# These may write a long text. SGLang ends it when its client has gone.
WRITING = re.compile("/generate|completions|/v1/responses|/v1/messages|/api/chat|/invocations")
SECONDS = 5  # for the answer to one of them
WAIT = 30  # seconds for any other. SGLang's check of health says after 20 that it failed.


def failure(server: Client, case: Case, seconds: float) -> str | None:
    """What is wrong with the answer to a request; None for nothing. May raise a Timeout."""
    try:
        answer = requests.request(
            case.method,
            f"{server.url}{case.path}",
            params=case.query,
            data=case.form if case.body is None else case.body,
            files={"file": b"x"} if case.form and "file" in case.form else None,
            headers={} if case.body is None else {"content-type": "application/json"},
            timeout=seconds,
            stream=True,
        )
        text = _beginning(answer)
    except requests.Timeout:
        raise
    except requests.RequestException as error:
        return str(error)
    if answer.status_code >= 500 or re.search(r'"code":\s*5\d\d', text):
        return f"{answer.status_code} {text[:500]}"
    return None


def _beginning(answer: requests.Response) -> str:
    """What a stream sends within a few seconds, or the whole answer."""
    end, read = time.monotonic() + SECONDS, b""
    for chunk in answer.iter_content(None):
        read += chunk
        if time.monotonic() > end:
            break
    answer.close()
    return read.decode(errors="replace")


def fuzz(server: Client, examples: int) -> None:
    bodies = Bodies(requests.get(f"{server.url}/openapi.json", timeout=60).json())
    late: list[Case] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a server that has ended has no smaller failure
    )
    @given(cases(bodies))
    def each(case: Case) -> None:
        writing = WRITING.search(case.path)
        try:
            wrong = failure(server, case, SECONDS if writing else WAIT)
        except requests.Timeout:
            wrong = None if writing else f"no answer in {WAIT} s"
            late.append(case)
        assert wrong is None, f"{case}\n{wrong}\n{server.server.tail(60)}"
        assert server.server.alive, f"{case}\n{server.server.tail(60)}"

    each()
    print(*late, sep="\n")
    assert len(late) <= examples // 20
