"""Requests drawn from a server's own OpenAPI schema, most of them wrong somewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, get_type_hints
from urllib.parse import quote

from hypothesis import strategies as st
from pydantic import TypeAdapter
from sglang.srt.sampling.sampling_params import SamplingParams

Schema = dict[str, Any]
METHODS = ("get", "post", "put", "delete")
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
# Values of every kind that a field may hold against its schema.
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 2**31, 2**63, -(2**70), 1e308),
    *(
        "",
        "x",
        "1",
        "(",
        "\ud800",
        "\0",
        [],
        [None],
        [[]],
        [[1]],
        ["x"],
        [1, "x"],
        {},
        {"x": 1},
        DEEP,
    ),
]
TEXTS = ["x", "", "def f(", "{}", '{"type": 1}', "[a-z]{2}", "auto", "\0", "é", "x" * 300]
WHOLE = [0, 1, 2, 5, 2047, 2048, -1, 2**31, 2**63]
NUMBERS = [0, 0.5, 1, 2, -1, 1e-320, 1e308]
BROKEN = [b"{", b"nul", b"\xff", b"[" * 100_000, b'{"a":' * 2_000 + b"1" * 5_000]
# These do what they are asked to do, which would stop or slow the other cases. So one field of
# their bodies is always of a wrong type, and they still may not end the server.
STEERING = {  # path: the field, and the reason
    "/pause_generation": ("mode", "stops all answers"),
    "/slow_down": ("forward_sleep_time", "makes each step sleep"),
    "/release_memory_occupation": ("tags", "ends serving until the memory is resumed"),
    "/start_profile": ("activities", "writes traces"),
    "/configure_logging": ("log_level", "writes requests into folders"),
    "/update_weights_from_disk": ("model_path", "asks a hub for the model"),
    "/init_weights_update_group": ("world_size", "waits for other processes"),
    "/init_weights_send_group_for_remote_instance": ("world_size", "waits for other processes"),
    "/send_weights_to_remote_instance": ("ports", "waits for other processes"),
}
OF_NO_TYPE: list[Any] = [{"x": 1}, [[1]], [{"x": []}]]  # neither text, a number nor a list of text
# False, but not null: SGLang asks for truth in one place, and for None in another.
FALSE: list[Any] = ["", [], {}, 0, False]
RIGHT: dict[str, Schema] = {  # bodies that are served, where a required field alone is not enough
    "/generate": {"text": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
}
SHORT: Schema = {  # unless a case draws another length
    **{"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4},
    "sampling_params": {"max_new_tokens": 8},
    "options": {"num_predict": 4},  # Ollama's
}


@dataclass(frozen=True)
class Case:
    """One request."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    form: dict[str, str] | None = None

    def __repr__(self) -> str:
        sent = self.form if self.body is None else self.body[:4_000]
        return f"{self.method.upper()} {self.path} {self.query or ''} {sent!r}"


def sampling_schema() -> Schema:
    """The schema of the sampling parameters, which SGLang's OpenAPI calls an object."""
    known = signature(SamplingParams).parameters
    hints = get_type_hints(SamplingParams) or get_type_hints(SamplingParams.__init__)
    hints = {name: hints[name] for name in known if name != "watermark"}  # of no pydantic type
    fields = {name: TypeAdapter(hint).json_schema() for name, hint in hints.items()}
    return {"type": "object", "properties": fields}


def body_schema(operation: Schema) -> Schema:
    """The schema of an operation's JSON body."""
    content = operation.get("requestBody", {}).get("content", {})
    schema: Schema = content.get("application/json", {}).get("schema", {"type": "object"})
    return schema


class Bodies:
    """Strategies for the operations of an OpenAPI document, more often those with many fields."""

    def __init__(self, document: Schema) -> None:
        self.document = document
        self.named = {"sampling_params": sampling_schema(), "options": sampling_schema()}
        self.operations = [
            (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if method in METHODS
            for _ in range(1 + len(self.names(body_schema(operation))) // 8)
        ]

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def names(self, schema: Schema) -> set[str]:
        schema = self.resolved(schema)
        return set(schema.get("properties", ()))

    def value(self, schema: Schema, depth: int = 0, right: bool = False) -> st.SearchStrategy[Any]:
        """A value of this schema, or in one of six draws any other. right: never another."""
        schema = self.resolved(schema)
        by_schema = self._by_schema(schema, depth)
        if right:
            return by_schema
        return st.integers(0, 5).flatmap(lambda d: st.sampled_from(WRONG) if d == 0 else by_schema)

    def _by_schema(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return st.sampled_from(schema[several]).flatmap(
                    lambda s: self.value(s, depth, True)
                )
        if depth > 4:
            return st.sampled_from(WRONG)
        match schema.get("type"):
            case "string":
                return st.sampled_from(TEXTS)
            case "integer":
                return st.sampled_from(WHOLE)
            case "number":
                return st.sampled_from(NUMBERS)
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case "array":
                return st.lists(self.value(schema.get("items", {}), depth + 1), max_size=2)
            case "object":
                return self._object(schema, depth)
        return st.sampled_from(WRONG)

    def _object(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        fields: Schema = schema.get("properties", {})
        if not fields:
            return st.dictionaries(
                st.sampled_from(["x", "type", "id"]), st.sampled_from(WRONG), max_size=2
            )
        required = {name: fields[name] for name in schema.get("required", ())}
        optional = sorted(set(fields) - set(required))
        if "text" in fields and "input_ids" in fields:  # a request for text needs a prompt
            required["text"] = {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
            }

        def drawn(names: list[str]) -> st.SearchStrategy[Any]:
            chosen = {**required, **{name: fields[name] for name in names}}
            return st.fixed_dictionaries(
                {
                    name: self.value(self.named.get(name, part), depth + 1)
                    for name, part in chosen.items()
                }
            )

        if not optional:
            return drawn([])
        return st.lists(st.sampled_from(optional), unique=True, max_size=4).flatmap(drawn)


def false_cases(bodies: Bodies) -> Iterator[Case]:
    """Each field of each body, with each value of `FALSE` and none else that is wrong."""
    for path, methods in bodies.document["paths"].items():
        for method, operation in methods.items():
            schema = body_schema(operation)
            fields = bodies.names(schema)
            if path in STEERING or method not in METHODS or not fields:
                continue
            right = dict(RIGHT.get(path, {}))
            _shorten(right, fields)
            for name in sorted(fields):
                for value in FALSE:
                    yield Case(method, path, body=json.dumps(right | {name: value}).encode())
            for place in sorted(fields & set(bodies.named)):
                for name in bodies.named[place]["properties"]:
                    for value in FALSE:
                        params = right.get(place, {}) | {name: value}
                        yield Case(method, path, body=json.dumps(right | {place: params}).encode())


@st.composite
def cases(draw: st.DrawFn, bodies: Bodies) -> Case:
    """A request to any operation."""
    method, path, operation = draw(st.sampled_from(bodies.operations))
    url, query = path, {}
    for place in operation.get("parameters", ()):
        value = str(draw(bodies.value(place["schema"])))[:200].replace("\ud800", "")
        if place["in"] == "path":
            url = url.replace(f"{{{place['name']}}}", f"x{quote(value)}")
        elif draw(st.booleans()):
            query[place["name"]] = value
    content = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in content:
        fields = sorted(bodies.resolved(content["multipart/form-data"]["schema"])["properties"])
        form = draw(st.dictionaries(st.sampled_from(fields), st.sampled_from(TEXTS)))
        return Case(method, url, query, form=form)
    if draw(st.integers(0, 19)) == 0:
        return Case(method, url, query, draw(st.sampled_from(BROKEN)))
    return Case(method, url, query, draw(_body(bodies, path, body_schema(operation))))


@st.composite
def _body(draw: st.DrawFn, bodies: Bodies, path: str, schema: Schema) -> bytes:
    value = draw(bodies.value(schema, right=True))
    if path in STEERING:
        value = value if isinstance(value, dict) else {}
        value[STEERING[path][0]] = draw(st.sampled_from(OF_NO_TYPE))
    if isinstance(value, dict):
        _shorten(value, bodies.names(schema))
    return json.dumps(value).encode()


def _shorten(body: Schema, fields: set[str]) -> None:
    for name in sorted(fields & set(SHORT)):
        short = SHORT[name]
        body.setdefault(name, short)
        if isinstance(body[name], dict) and isinstance(short, dict):
            body[name] = {**short, **body[name]}
