"""Streamed tool calls over HTTP, of a server whose blocks are accepted whole.

A grammar makes the bundled target write the calls. A plugin drafts what was written before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from test.answers import ANSWERS, CALLS, TOOLS
from test.plugins import distribution
from test.server.test_api import scraped, total
from test.servers import FULL, Client, running

ROOT = Path(__file__).parents[2]
ONE_BY_ONE = 899  # as max_tokens: the server commits one token a step
IN_BLOCKS = 900
GIVEN = """
    def plugin():
        import json, os
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def write(manager, obj, *_, **__):
            from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

            params = obj.sampling_params
            if params.get("max_new_tokens") in (899, 900):
                params["ebnf"] = "root ::= " + os.environ["ANSWER"]
            if params.get("max_new_tokens") == 899:
                obj.custom_logit_processor = DisallowedTokensLogitsProcessor.to_str()
                params["custom_params"] = {"token_ids": []}

        def draft(result, scheduler):
            from test.remembered import remember

            remember(scheduler.draft_worker)

        manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
        HookRegistry.register(f"{manager}.generate_request", write, HookType.BEFORE)
        scheduler = "sglang.srt.managers.scheduler.Scheduler"
        HookRegistry.register(f"{scheduler}.get_init_info", draft, HookType.AFTER)
"""
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "tools": TOOLS,
}
ANTHROPIC = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
    "stream": True,
    "tools": [
        {"name": function["name"], "input_schema": function["parameters"]}
        for function in (tool["function"] for tool in TOOLS)
    ],
}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Client]:
    """A server with the parser of this name."""
    parser = request.param
    plugin = distribution(tmp_path_factory.mktemp(parser), "given", "1.0", GIVEN)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(plugin), str(ROOT)]),
        "ANSWER": json.dumps(ANSWERS[parser], ensure_ascii=False),
    }
    flags = ("--tool-call-parser", parser, "--enable-custom-logit-processor", "--enable-metrics")
    with running(*flags, *FULL, dflash=True, environment=environment) as client:
        yield client


def events(server: Client, path: str, body: dict[str, Any], tokens: int) -> list[str]:
    """The events of a stream, without what changes from one to the next."""
    answer = requests.post(
        f"{server.url}{path}", json=body | {"max_tokens": tokens}, timeout=300, stream=True
    )
    assert answer.status_code == 200, answer.text
    changing = r'"(id|created|tool_call_id)":("[^"]*"|\d+)'
    return [re.sub(changing, r'"\1"', line.decode()) for line in answer.iter_lines() if line]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", pytest.param("/v1/messages", marks=pytest.mark.ci)]
)
@pytest.mark.parametrize(
    "server",
    [
        "deepseekv4",
        pytest.param("llama3", marks=pytest.mark.full),
        pytest.param("qwen25", marks=pytest.mark.ci),
    ],
    indirect=True,
    scope="module",
)
def test_streamed_calls(server: Client, path: str) -> None:
    body = CHAT if path == "/v1/chat/completions" else ANTHROPIC

    def steps() -> float:
        return total(scraped(server), "spec_verify_steps_total")

    begun = steps()
    expected = events(server, path, body, ONE_BY_ONE)  # the plugin remembers it
    one_by_one = steps()
    assert events(server, path, body, IN_BLOCKS) == expected
    assert one_by_one - begun > 3 * (steps() - one_by_one)
    joined = "".join(expected)
    assert all(f'"{name}"' in joined for name, _ in CALLS)
