"""Load tools that others use, against one DFLASH server: SGLang's own, GuideLLM and AIPerf.

All send the same chat prompts at the same concurrency, and so does this project's own client. Each
answer has the same number of tokens, so every tool must count the same. GuideLLM and AIPerf run in
environments of their own (`uv tool run`), because their dependencies are not ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.load import Settings, answer_all, stream_all
from benchmark.workloads import Prompt
from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools import serve
from sglang_dflash.tools.launch import Server, interrupt_on_signals

GUIDELLM, AIPERF = "guidellm==0.8.1", "aiperf==0.13.0"
SECONDS = 1800  # of a tool, with its installation


@dataclass(frozen=True)
class Load:
    """What every tool sends."""

    url: str
    tokenizer: str
    prompts: list[str]
    concurrency: int
    max_tokens: int  # of every answer: end tokens do not count

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return len(self.prompts) * self.max_tokens


@dataclass(frozen=True)
class Measured:
    """What a tool reports."""

    requests: int  # answered
    tokens: int  # of all answers, as the server counts
    tokens_per_second: float
    first_ms: float  # median time to the first token
    between_ms: float  # mean time between tokens


def own_client(load: Load, _: Path) -> Measured:
    settings = Settings(load.concurrency, load.max_tokens, 0.0, {}, ignore_eos=True)
    prompts = [Prompt("word", text) for text in load.prompts]
    answers, seconds = answer_all([load.url], prompts, settings)
    streamed = stream_all([load.url], prompts, settings)
    tokens = sum(answer.tokens for answer in answers)
    gaps = [gap for answer in streamed for gap in answer.gaps]
    return Measured(
        len(answers),
        tokens,
        tokens / seconds,
        1000 * median(answer.first_s for answer in streamed),
        1000 * sum(gaps) / len(gaps),
    )


def bench_serving(load: Load, folder: Path) -> Measured:
    """`sglang.bench_serving`, SGLang's own."""
    data, out = folder / "sharegpt.json", folder / "bench_serving.jsonl"
    turns = [[{"value": text}, {"value": "an answer that is not read"}] for text in load.prompts]
    data.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    _run(
        [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"],
        *("--base-url", load.url),
        *("--model", load.tokenizer),
        *("--dataset-name", "sharegpt"),
        *("--dataset-path", data),
        *("--sharegpt-output-len", load.max_tokens),
        *("--num-prompts", len(load.prompts)),
        *("--max-concurrency", load.concurrency),
        *("--output-file", out),
    )
    found = json.loads(out.read_text().splitlines()[-1])
    return Measured(
        found["completed"],
        found["total_output_tokens"],
        found["output_throughput"],
        found["median_ttft_ms"],
        found["mean_tpot_ms"],
    )


def guidellm(load: Load, folder: Path) -> Measured:
    data, out = folder / "guidellm.jsonl", folder / "guidellm.json"
    rows = [{"prompt": text, "output_tokens_count": load.max_tokens} for text in load.prompts]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _run(
        [sys.executable, "-m", "uv", "tool", "run", "--from", GUIDELLM, "guidellm", "run"],
        "--disable-console-interactive",
        *("--backend", f"kind=openai_http,target={load.url},model=default"),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={len(load.prompts)}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
        *("--data", f"kind=json_file,path={data}"),
        *("--output", f"kind=json,path={out}"),
    )
    [run] = json.loads(out.read_text())["benchmarks"]
    metrics = run["metrics"]

    def of(name: str) -> dict[str, float]:
        found: dict[str, float] = metrics[name]["successful"]
        return found

    return Measured(
        metrics["request_totals"]["successful"],
        int(of("output_token_count")["total_sum"]),
        of("output_tokens_per_second")["mean"],
        of("time_to_first_token_ms")["median"],
        of("inter_token_latency_ms")["mean"],
    )


def aiperf(load: Load, folder: Path) -> Measured:
    data, out = folder / "aiperf.jsonl", folder / "aiperf"
    data.write_text("".join(f"{json.dumps({'text': text})}\n" for text in load.prompts))
    _run(
        [sys.executable, "-m", "uv", "tool", "run", "--from", AIPERF, "aiperf", "profile"],
        *("--model", "default"),
        *("--url", load.url),
        *("--endpoint-type", "chat"),
        "--streaming",
        "--use-server-token-count",
        *("--tokenizer", load.tokenizer),
        *("--input-file", data),
        *("--custom-dataset-type", "single_turn"),
        *("--concurrency", load.concurrency),
        *("--request-count", len(load.prompts)),
        *("--osl", load.max_tokens),
        *("--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", out),
        *("--ui", "none"),
    )
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return Measured(
        int(found["request_count"]["avg"]),
        int(found["total_output_tokens"]["avg"]),
        found["output_token_throughput"]["avg"],
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["avg"],
    )


TOOLS: dict[str, Callable[[Load, Path], Measured]] = {
    "own": own_client,
    "bench_serving": bench_serving,
    "guidellm": guidellm,
    "aiperf": aiperf,
}


def _run(command: list[str], *flags: object) -> None:
    """Run a tool. Its output is shown if it fails."""
    done = subprocess.run(
        [*command, *map(str, flags)], capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def measure(load: Load, tools: list[str], console: Console) -> dict[str, Measured]:
    """Run the tools one after another; raises `RuntimeError` if one fails or counts otherwise."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        own_client(load, Path(folder))  # warms up the server
        for tool in tools:
            console.print(f"{tool} ...", style="dim")
            found[tool] = seen = TOOLS[tool](load, Path(folder))
            if (seen.requests, seen.tokens) != (len(load.prompts), load.tokens):
                raise RuntimeError(
                    f"{tool} counts {seen.requests} answers with {seen.tokens} tokens. It sent "
                    f"{len(load.prompts)} requests for {load.tokens} tokens."
                )
    return found


def show(found: dict[str, Measured], console: Console) -> None:
    table = Table("", "answers", "tokens", "tok/s", "first token, ms", "between tokens, ms")
    for tool, seen in found.items():
        table.add_row(
            tool,
            str(seen.requests),
            str(seen.tokens),
            f"{seen.tokens_per_second:.0f}",
            f"{seen.first_ms:.0f}",
            f"{seen.between_ms:.2f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", metavar="URL", help="a running server; default: starts one")
    parser.add_argument("--tokenizer", default=str(TARGET), help="folder or hub id of the target")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"unknown tools: {', '.join(sorted(unknown))}")
    interrupt_on_signals()
    console, prompts = Console(), [example.prompt for example in held_out("word", options.prompts)]
    with ExitStack() as stack:
        url = options.base_url
        if url is None:
            console.print("Starting a server ...", style="dim")
            url = stack.enter_context(Server(serve.flags(), serve.environment())).url
        load = Load(url, options.tokenizer, prompts, options.concurrency, options.max_tokens)
        found = measure(load, tools, console)
    show(found, console)
    if options.out is not None:
        report: dict[str, Any] = {"load": asdict(load)}
        report["load"].pop("prompts")
        report["tools"] = {tool: asdict(seen) for tool, seen in found.items()}
        options.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
