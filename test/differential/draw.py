"""Random requests from a seed: features of every API in any combination."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from test.servers import chat
from training import data


@dataclass
class Request:
    """One HTTP request."""

    number: int
    path: str
    body: dict[str, Any]
    features: list[str]
    delay: float = 0.0  # seconds before a DFLASH server gets it
    abort_after: float | None = None  # seconds until it is aborted

    @property
    def temperature(self) -> float:
        value: float = self.body.get("sampling_params", self.body)["temperature"]
        return value


def draw(number: int, seed: int, adapters: tuple[str, ...] = ()) -> Request:
    """Request `number` of a seed: the same whatever else is drawn.

    adapters: the names of LoRA adapters, of which a request has one or none.
    """
    rng = random.Random(f"{seed}-{number}")
    kind = rng.choices((native, chat_completion, completion), (0.6, 0.25, 0.15))[0]
    request = kind(number, rng)
    if request.path == "/generate" and request.temperature > 0:
        own = random.Random(f"seed-{seed}-{number}")
        request.body["sampling_params"]["sampling_seed"] = own.randint(0, 2**40)
    adapter = random.Random(f"adapter-{seed}-{number}").choice((None, *adapters))
    if adapter is not None:
        request.features.append("lora_path")
        request.body["lora_path"] = adapter
    return request


def is_served_by_sglang(request: Request) -> bool:
    """Can a server without speculation answer this right, in company and as a stream?

    docs/contributors/sglang.md has the defects of SGLang that would end or change it. There, a
    token sampled with a seed depends on whether another request has top_k or top_p.
    """
    features = set(request.features)
    in_company = {"token_ids_logprob", "custom_logit_processor", "hidden_states", "seeded"}
    return not (features & in_company or features >= {"stream", "logprobs"})


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
