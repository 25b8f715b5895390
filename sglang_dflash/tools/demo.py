"""Serve the bundled pair without and with DFLASH, and compare answers and speed."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools import serve
from sglang_dflash.tools.launch import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = 8
NEW_TOKENS = 128
NEAR_TIE = 0.05  # nats between the two most likely tokens


@dataclass
class Run:
    """The answers of one server to all prompts."""

    texts: list[str]
    tokens: int
    seconds: float
    accepted: int = 0
    steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        """(accepted drafts + verify steps) / verify steps."""
        return (self.accepted + self.steps) / max(1, self.steps)


def prompts() -> list[str]:
    """Held-out chat prompts: 6 word problems, 2 records."""
    examples = held_out("word", PROMPTS - 2, seed=1) + held_out("json", 2, seed=1)
    return [example.prompt for example in examples]


@contextmanager
def serving(dflash: bool, console: Console) -> Iterator[tuple[Server, OpenAI]]:
    name = "with DFLASH" if dflash else "without speculation"
    with ExitStack() as stack:
        with console.status("") as status:

            def waiting(seconds: float) -> None:
                status.update(f"Starting the server {name} … {seconds:.0f} s")

            server = stack.enter_context(
                Server(serve.flags(dflash), serve.environment(), waiting=waiting)
            )
        yield server, OpenAI(base_url=f"{server.url}/v1", api_key="none")


def ask(client: OpenAI, prompt: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=NEW_TOKENS,
        **options,
    )


def measure(client: OpenAI, questions: list[str], console: Console, name: str) -> Run:
    """Send all prompts one after another, after one warm-up prompt."""
    ask(client, "Warm up.", extra_body={"ignore_eos": True})
    run = Run([], 0, 0.0)
    with console.status("") as status:
        for i, question in enumerate(questions, start=1):
            status.update(f"Asking {name}: {i} of {len(questions)}")
            started = time.perf_counter()
            answer = ask(client, question, extra_body={"return_meta_info": True})
            run.seconds += time.perf_counter() - started
            run.texts.append(answer.choices[0].message.content)
            run.tokens += answer.usage.completion_tokens
            meta = answer.choices[0].meta_info
            run.accepted += meta.get("spec_num_correct_drafts", 0)
            run.steps += meta.get("spec_verify_ct", 0)
    return run


def stream(client: OpenAI, question: str, console: Console) -> None:
    """Show one answer as it arrives. The colour changes with each verify step."""
    console.print(Text(question, style="dim"))
    text, colours = Text(), ("bold cyan", "bold yellow")
    for i, chunk in enumerate(ask(client, question, stream=True)):
        if chunk.choices and chunk.choices[0].delta.content:
            text.append(chunk.choices[0].delta.content, style=colours[i % 2])
    console.print(text)


def is_near_tie(client: OpenAI, question: str, other: str) -> bool:
    """Whether the answer leaves `other` at a near-tie, with each token the argmax of its row."""
    content = ask(client, question, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    said = ""
    for token in content:
        first, second = token.top_logprobs[:2]
        if token.logprob < first.logprob:
            return False
        if not other.startswith(said + token.token):
            return bool(first.logprob - second.logprob < NEAR_TIE)
        said += token.token
    return False


def run() -> int:
    """Run the whole demo. Returns 0 if every answer is the target's own.

    It ends with a line of JSON, for programs.
    """
    console = Console()
    questions = prompts()
    with serving(False, console) as (_, client):
        plain = measure(client, questions, console, "the target alone")
    with serving(True, console) as (_, client):
        dflash = measure(client, questions, console, "DFLASH")
        stream(client, questions[0], console)
        pairs = zip(questions, dflash.texts, plain.texts, strict=True)
        different = [(q, theirs) for q, ours, theirs in pairs if ours != theirs]
        near_ties = sum(is_near_tie(client, q, theirs) for q, theirs in different)
    identical = near_ties == len(different)
    speedup = dflash.tokens_per_second / plain.tokens_per_second
    table = Table("", "tokens/s", "accept length", "speed-up", "identical")
    table.add_row("target alone", f"{plain.tokens_per_second:.0f}", "", "1.00", "")
    table.add_row(
        "DFLASH",
        f"{dflash.tokens_per_second:.0f}",
        f"{dflash.accept_length:.2f}",
        f"{speedup:.2f}",
        "yes" if identical else "NO",
    )
    console.print(table)
    result = {
        "identical": identical,
        "prompts": len(questions),
        "near_ties": near_ties,
        "accept_length": round(dflash.accept_length, 3),
        "tok_s": {
            "none": round(plain.tokens_per_second, 1),
            "dflash": round(dflash.tokens_per_second, 1),
        },
        "speedup": round(speedup, 3),
    }
    print(json.dumps(result), flush=True)
    return 0 if identical else 1
