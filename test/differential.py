"""`python -m test.differential --requests N --seed S [server flags]`

Draws random requests from a seed, asks a server without speculation one by one, asks a DFLASH
server the same in random company, and compares every field of every answer. A request that differs
is printed with its number; `--only NUMBER` replays it alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from test.plugins import distribution
from test.server.conftest import Client, chat, running
from training import data

SERVER_FLAGS = [
    "--enable-deterministic-inference",
    "--enable-custom-logit-processor",
    "--enable-return-hidden-states",
    "--tool-call-parser",
    "qwen25",
]
# SGLang applies penalties in the order of a set of classes, another in every process. Here the
# reference adds before it scales, as ours does.
ORDERED = """
    def plugin():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def ordered(orchestrator, vocab_size, batch, penalizers):
            by_name = sorted(penalizers, key=lambda penalizer: penalizer.__name__)
            return (orchestrator, vocab_size, batch, by_name), {}

        orchestrator = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator"
        HookRegistry.register(f"{orchestrator}.__init__", ordered, HookType.BEFORE)
"""
VALUE_TOLERANCE = 1e-5  # logprobs, relative below -1
ANSWER_SHOWN = 3000  # characters
STATE_TOLERANCE = 1e-3  # hidden states, whose size is about 30
IGNORED = {  # what two equal answers of two servers may differ in
    "id",
    "created",
    "e2e_latency",
    "cached_tokens",
    "weight_version",
    "prompt_tokens_details",
    "cached_tokens_details",
    "num_retractions",
    "request_received_ts",
    "response_sent_to_client_ts",
    "tool_call_id",
}


@dataclass
class Request:
    """One HTTP request. `abort_after` seconds, where not None, it is aborted."""

    number: int
    path: str
    body: dict[str, Any]
    features: list[str]
    delay: float = 0.0
    abort_after: float | None = None


@dataclass
class Report:
    compared: int = 0
    features: dict[str, int] = field(default_factory=dict)
    differing: list[tuple[Request, str]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------
# drawing requests


def draw(number: int, seed: int) -> Request:
    """Request `number` of a seed: the same whatever else is drawn."""
    rng = random.Random(f"{seed}-{number}")
    kind = rng.choices((native, chat_completion, completion), (0.6, 0.25, 0.15))[0]
    return kind(number, rng)


def maybe(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def user_text(rng: random.Random) -> str:
    example = rng.choice((data.word_problem, data.json_record))(rng)
    return example.prompt


def sampling(rng: random.Random, features: list[str]) -> dict[str, Any]:
    """Parameters that the native and the OpenAI API share by name."""
    body: dict[str, Any] = {"temperature": 0.0}
    if maybe(rng, 0.5):
        features.append("seeded")
        body = {"temperature": rng.choice((0.6, 1.0, 1.4))}
        if maybe(rng, 0.4):
            body["top_k"] = rng.randint(1, 30)
        if maybe(rng, 0.4):
            body["top_p"] = round(rng.uniform(0.3, 0.99), 2)
    penalty = rng.choices(
        (None, "frequency_penalty", "presence_penalty", "repetition_penalty"),
        (0.6, 0.15, 0.15, 0.1),
    )[0]
    if penalty:
        features.append(penalty)
        strongest = 1.6 if penalty == "repetition_penalty" else 1.0
        body[penalty] = round(
            rng.uniform(1.05, strongest) if strongest > 1 else rng.uniform(-0.4, 1), 2
        )
        if penalty == "repetition_penalty" and maybe(rng, 0.3):
            body["presence_penalty"] = 0.5
    if maybe(rng, 0.15):
        features.append("logit_bias")
        body["logit_bias"] = {str(rng.randint(4, 2047)): rng.uniform(-5, 5) for _ in range(4)}
    if maybe(rng, 0.15):
        features.append("min_tokens")
        body["min_new_tokens"] = rng.randint(1, 40)
    if maybe(rng, 0.2):
        features.append("stop")
        body["stop"] = rng.sample([" the", ".", " = ", "\n\n", " has", '":', "3", "self"], 2)
    if maybe(rng, 0.1):
        features.append("stop_token_ids")
        body["stop_token_ids"] = rng.sample(range(4, 600), 8)
    if maybe(rng, 0.1):
        features.append("stop_regex")
        body["stop_regex"] = [rng.choice((r"\d\d", r"[a-z]+ing", r"= \d+"))]
    for flag in ("ignore_eos", "no_stop_trim"):
        if maybe(rng, 0.1):
            features.append(flag)
            body[flag] = True
    return body


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
    "triggers": ["<n>"],
}


def grammar(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"json_schema": json.dumps(SCHEMA)},
            {"regex": r"(yes|no|maybe), because [a-z ]{3,20}\."},
            {"regex": r"The answer is the number one hundred and [a-z]{1,6}-[a-z]{1,6}\."},
            {"ebnf": 'root ::= "(" root ")" | [0-9] | root2\nroot2 ::= "+" [0-9]+ "=" [0-9]'},
            {"structural_tag": json.dumps(TAG)},
        )
    )


def native(number: int, rng: random.Random) -> Request:
    features = ["/generate"]
    params = sampling(rng, features)
    params["max_new_tokens"] = rng.choice((1, 2, 5, 17, 40, 80))
    body: dict[str, Any] = {"sampling_params": params}
    source = rng.random()
    if source < 0.6:
        body["text"] = chat(user_text(rng))
    elif source < 0.85:
        body["text"] = rng.choice(data.code_prompts()).prompt
    else:
        features.append("input_ids")
        body["input_ids"] = rng.choices(range(4, 2048), k=rng.randint(1, 60))
    if maybe(rng, 0.25):
        features.append("grammar")
        params |= grammar(rng)
    if maybe(rng, 0.35):
        features.append("logprobs")
        body["return_logprob"] = True
        if maybe(rng, 0.6):
            body["top_logprobs_num"] = rng.randint(1, 5)
        if maybe(rng, 0.4):
            features.append("token_ids_logprob")
            body["token_ids_logprob"] = rng.sample(range(2048), 3)
        if maybe(rng, 0.5):
            body["logprob_start_len"] = 0
    if maybe(rng, 0.08):
        features.append("n")
        params["n"] = 2
    if maybe(rng, 0.05):
        features.append("hidden_states")
        body["return_hidden_states"] = True
        params["max_new_tokens"] = min(12, params["max_new_tokens"])
    if maybe(rng, 0.08):
        features.append("custom_logit_processor")
        body["custom_logit_processor"] = DisallowedTokensLogitsProcessor.to_str()
        params["custom_params"] = {"token_ids": rng.sample(range(4, 2048), 20)}
    if maybe(rng, 0.15) and params.get("n", 1) == 1:
        features.append("stream")
        body["stream"] = True
    request = Request(number, "/generate", body, features, delay=rng.uniform(0, 2.0))
    if maybe(rng, 0.06) and "n" not in features and "stream" not in features:
        features.append("abort")
        params |= {"max_new_tokens": 400, "ignore_eos": True}
        body["rid"] = f"differential-{number}-{rng.random()}"
        request.abort_after = rng.uniform(0.2, 1.5)
    return request


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "maxLength": 12},
                "page": {"type": "integer"},
            },
            "required": ["word", "page"],
        },
    },
}


def openai_sampling(rng: random.Random, features: list[str]) -> dict[str, Any]:
    body = sampling(rng, features)
    if body["temperature"] > 0:
        body["seed"] = rng.randint(0, 2**31)
    body["max_tokens"] = rng.choice((1, 3, 20, 70))
    if maybe(rng, 0.15):
        features.append("stream")
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if "min_new_tokens" in body:
        body["min_tokens"] = body.pop("min_new_tokens")
    return body | {"model": "default"}


def chat_completion(number: int, rng: random.Random) -> Request:
    features = ["/v1/chat/completions"]
    body = openai_sampling(rng, features)
    body["messages"] = [{"role": "user", "content": user_text(rng)}]
    if maybe(rng, 0.3):
        features.append("turns")
        example = data.word_problem(rng)
        body["messages"] = [
            {"role": "user", "content": example.prompt},
            {"role": "assistant", "content": example.answer},
            *body["messages"],
        ]
    if maybe(rng, 0.3):
        features.append("logprobs")
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 4)}
    form = rng.random()
    if form < 0.2:
        features.append("response_format")
        schema = {"name": "record", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form < 0.4:
        features.append("tools")
        named = {"type": "function", "function": {"name": "look_up"}}
        body |= {"tools": [TOOL], "tool_choice": rng.choice(("required", named)), "max_tokens": 70}
        body.pop("stop", None)
    return Request(number, "/v1/chat/completions", body, features, delay=rng.uniform(0, 2.0))


def completion(number: int, rng: random.Random) -> Request:
    features = ["/v1/completions"]
    body = openai_sampling(rng, features)
    body["prompt"] = rng.choice(data.code_prompts()).prompt
    if maybe(rng, 0.4):
        features.append("echo")
        body["echo"] = True
    if maybe(rng, 0.3):
        features.append("logprobs")
        body["logprobs"] = rng.randint(1, 4)
    return Request(number, "/v1/completions", body, features, delay=rng.uniform(0, 2.0))


def seeded(request: Request, seed: int) -> Request:
    """Sampled native requests carry a seed of their own."""
    params = request.body.get("sampling_params")
    if params and params["temperature"] > 0:
        params["sampling_seed"] = random.Random(f"seed-{seed}-{request.number}").randint(0, 2**40)
    return request


# ---------------------------------------------------------------------------------------------
# asking


@contextmanager
def reference() -> Iterator[Client]:
    """A server without speculation."""
    with TemporaryDirectory() as folder:
        path = distribution(Path(folder), "ordered", "1.0", ORDERED)
        with running(*SERVER_FLAGS, dflash=False, environment={"PYTHONPATH": str(path)}) as client:
            yield client


def ask(url: str, request: Request) -> Any:
    """The answer: JSON, or for a stream its chunks joined; an error as its status and text."""
    stream = request.body.get("stream", False)
    answer = requests.post(f"{url}{request.path}", json=request.body, timeout=600, stream=stream)
    if answer.status_code != 200:
        return {"status": answer.status_code, "error": answer.text}
    if not stream:
        return answer.json()
    chunks = [
        json.loads(line[6:])
        for line in answer.iter_lines()
        if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    return chunks[-1] if request.path == "/generate" else joined(chunks)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """An OpenAI stream as one object: text, logprobs, finish reason and usage."""
    whole: dict[str, Any] = {"text": "", "logprobs": [], "calls": "", "finish": None, "usage": None}
    for chunk in chunks:
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for choice in chunk.get("choices", []):
            delta = choice.get("delta") or {}
            whole["text"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                part = call["function"]
                whole["calls"] += (part.get("name") or "") + (part.get("arguments") or "")
            whole["logprobs"] += logprob_items(choice.get("logprobs"))
            whole["finish"] = choice.get("finish_reason") or whole["finish"]
            whole["matched_stop"] = choice.get("matched_stop") or whole.get("matched_stop")
    return whole


def logprob_items(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return logprobs["content"] or []
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [list(item) for item in zip(*columns, strict=True)]


def ask_with_company(url: str, request: Request, scale: float) -> Any:
    time.sleep(request.delay * scale)
    if request.abort_after is not None:
        rid = request.body["rid"]
        aborting = threading.Timer(
            request.abort_after, requests.post, (f"{url}/abort_request",), {"json": {"rid": rid}}
        )
        aborting.start()
    return ask(url, request)


# ---------------------------------------------------------------------------------------------
# comparing


def impossible(answer: Any) -> bool:
    """Is this the logprob of a forbidden token? Which of those is named, is chance."""
    if isinstance(answer, dict):
        answer = [answer.get("logprob")]
    value = answer[0] if isinstance(answer, list) and answer else answer
    return isinstance(value, float) and value < -1e30


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place where two answers differ, or None."""
    if impossible(ours) and impossible(theirs):
        return None
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = {
            key
            for key in ours.keys() | theirs.keys()
            if key not in IGNORED
            and not key.startswith("spec_")
            and not impossible(ours.get(key, theirs.get(key)))
        }
        for key in sorted(keys):
            if (key in ours) != (key in theirs):
                return f"{where}.{key} is in one answer only"
            if key == "id" or (found := difference(ours[key], theirs[key], f"{where}.{key}")):
                return found
        return None
    if isinstance(theirs, list) and isinstance(ours, list):
        if where.endswith("hidden_states[0]"):  # the prompt's, behind what each server had cached
            least = min(len(ours), len(theirs))
            ours, theirs = ours[-least:], theirs[-least:]
        if len(ours) != len(theirs):
            return f"{where} has {len(ours)} items, not {len(theirs)}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if found := difference(a, b, f"{where}[{i}]"):
                return found
        return None
    if isinstance(theirs, float) and isinstance(ours, int | float):
        tolerance = VALUE_TOLERANCE * max(1.0, abs(theirs))
        if "hidden_states" in where:
            tolerance = STATE_TOLERANCE
        return None if abs(ours - theirs) <= tolerance else f"{where}: {ours} is not {theirs}"
    return None if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"


def judge(request: Request, ours: Any, theirs: Any) -> str | None:
    """A difference, or None. An aborted answer must be a beginning of the whole one."""
    if request.abort_after is None:
        return difference(ours, theirs)
    ids, whole = ours.get("output_ids", []), theirs.get("output_ids", [])
    if ids != whole[: len(ids)]:
        return "an aborted answer is no beginning of the whole one"
    kind = (ours["meta_info"]["finish_reason"] or {}).get("type")
    return None if kind == "abort" or len(ids) == len(whole) else f"aborted, but finished by {kind}"


def compare(
    asked: list[Request], reference: str, dflash: str, workers: int = 16, scale: float = 1.0
) -> Report:
    """Ask the reference one by one and the DFLASH server in company."""
    expected = [ask(reference, request) for request in asked]
    with ThreadPoolExecutor(workers) as pool:
        got = list(pool.map(lambda request: ask_with_company(dflash, request, scale), asked))
    report = Report()
    for request, ours, theirs in zip(asked, got, expected, strict=True):
        report.compared += 1
        for feature in request.features:
            report.features[feature] = report.features.get(feature, 0) + 1
        if found := judge(request, ours, theirs):
            answers = (json.dumps(answer)[:ANSWER_SHOWN] for answer in (ours, theirs))
            report.differing.append((request, "\n  ".join([found[:600], *answers])))
    return report


def show(report: Report, seed: int) -> None:
    for request, found in report.differing:
        print(f"\nREQUEST {request.number} (seed {seed}) DIFFERS: {found}")
        print(f"  {request.path} {json.dumps(request.body)[:1500]}")
    print(json.dumps({"features": dict(sorted(report.features.items()))}))
    print(
        json.dumps({"seed": seed, "compared": report.compared, "differing": len(report.differing)})
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="replay these requests")
    arguments, flags = parser.parse_known_args()
    numbers = range(arguments.requests) if arguments.only is None else arguments.only
    asked = [seeded(draw(number, arguments.seed), arguments.seed) for number in numbers]
    with (
        reference() as plain,
        running(*SERVER_FLAGS, *flags, dflash=True) as dflash,
    ):
        report = compare(asked, plain.url, dflash.url)
    show(report, arguments.seed)
    return 1 if report.differing else 0


if __name__ == "__main__":
    sys.exit(main())
