"""Bad requests: each is refused by the name of its field, and none ends a server or its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests
import torch
from openai import OpenAI

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.releases import OWN_STEP
from test.server.bodies import Bodies, false_cases
from test.server.conftest import on
from test.server.fuzzing import failure, fuzz
from test.server.tensors import serialised
from test.servers import Client, chat

NAN = float("nan")
HUGE = 2**70
# Values of sampling parameters that SGLang's types or its scheduler cannot hold.
SAMPLING: dict[str, list[Any]] = {
    "max_new_tokens": [1.5, "1", [1], {}, HUGE, -1, NAN],
    "stop": [1, [1], [[]], {}, ["\ud800"]],
    "stop_token_ids": [1.5, 1, [1.5], [[1]], "x", [HUGE]],
    "stop_regex": [0, "(", ["a", "["], [1]],
    "temperature": ["1", [1], NAN, float("inf"), -1],
    "top_p": ["1", [0.5], NAN, 0, 2],
    "top_k": [1.5, "1", [1], 2**40, -2, 0],
    "min_p": ["1", [0.1], NAN, -1],
    "frequency_penalty": ["1", [1], NAN, 3],
    "presence_penalty": ["1", [1], NAN, -3],
    "repetition_penalty": ["1", [1], NAN, 0, -1],
    "min_new_tokens": [1.5, "1", [1], 2**40, -1],
    "n": [1.5, "1", [1], None, 0, -1, 10**9],
    "json_schema": [{}, 1, ["{}"], True],
    "regex": [1, ["a"], {}],
    "ebnf": [1, ["a"], {}],
    "structural_tag": [1, ["a"], {}, ""],
    "ignore_eos": ["yes", [True], 2],
    "skip_special_tokens": ["yes", [True], 2],
    "spaces_between_special_tokens": ["yes", [True], 2],
    "no_stop_trim": ["yes", [True], 2],
    "custom_params": [1, "x", [1]],
    "stream_interval": [1.5, "1", 0, -1],
    "logit_bias": [1, [1], {"x": 1}, {"5": "x"}, {"5": NAN}, {"99999": 1}, {"-1": 1}],
    "sampling_seed": [1.5, "x", [1], HUGE],
    "no_such_field": [1],
}
# Fields that are wrong together.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("logprob_start_len", {"text": "x", "return_logprob": True, "logprob_start_len": -2}),
    ("input_ids", {"text": "x", "input_ids": [5], "input_embeds": [[0.0] * 192]}),
    *(
        (
            "stop_token_ids",
            {"text": "x", "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [t]}},
        )
        for t in (-1, 2048)
    ),
]
# The same for the other fields of /generate, with one prompt in no list.
FIELDS: dict[str, list[Any]] = {
    "text": [1, [], [1], ["\ud800"], {}],
    "input_ids": [[[1], []], [[1], 2], "x", [1.5], [HUGE], []],
    "sampling_params": [[], [{}], "x", 1],
    "rid": [[], ["a"], 1, {}],
    "token_ids_logprob": [[[1]], [1.5], "x", [-1]],
    "top_logprobs_num": [[1], -1, 2049, 1.5],
    "logprob_start_len": [[1], 1.5, "x"],
    "return_logprob": [[True], {}, 3],
    "return_hidden_states": [[True], "x"],
    "stream": [[], 5, "x"],
    "lora_id": [[], "x", 1],
    "lora_path": [["a"], 1, {}],
    "extra_key": [[], ["a"], 1],
    "session_params": [[], [{}], {"x": 1}, {"id": 1}, "x"],
    "custom_logit_processor": [["x"], 1, {}, "x", "{}", '{"callable": "80"}', '{"callable": 1}'],
    "positional_embed_overrides": ["x", 1, [1], {}],
    "priority": [1.5, "x", HUGE],
    "http_worker_ipc": ["x", 1],
    "decode_tp_size": [[1], "x"],
    "multi_item_delimiter_indices": [[[1]], 1],
    "bootstrap_room": [[1], HUGE],
    "custom_labels": [1, [], {"x": 1}],
    "input_embeds": [[], [[]], "x", [1.0]],
    "routed_dp_rank": [5, -1, "x"],
}
if not OWN_STEP:  # SGLang 0.5.23 alone has these, or they crash its scheduler alone
    SAMPLING |= {"beam_width": [0], "watermark": [1, {"enabled": True}]}
    SAMPLING["custom_params"] += [{"x": [[1]]}, {"x": {"y": [1]}}]
    FIELDS |= {"return_sampling_mask": [True], "cache_salt": [["a"]], "max_thinking_tokens": [1]}
    FIELDS["text"] += [""]
# Lists of a wrong length, beside two prompts.
BATCH: dict[str, list[Any]] = {
    "sampling_params": [[], [{}], [{}, {}, {}], [{}, 1], [{"n": 1}, {"n": 2}]],
    "rid": [[], ["a"], ["a", "a"], ["a", 1]],
    "return_logprob": [[], [True]],
    "top_logprobs_num": [[1], [1, None]],
    "token_ids_logprob": [[[1]], [[1], [2], [3]], [1, [2]]],
    "lora_path": [[], ["a"], ["a", 1]],
    "custom_logit_processor": [[], ["x"]],
    "video_data": [["x"]],
    "decode_tp_size": [1] if OWN_STEP else [[1]],  # since 0.5.19, one value is for all
    "extra_key": [["a", 1]],
    "session_params": [[{}, {}]],
}
WRONG = [
    *(("sampling_params", name, value) for name, values in SAMPLING.items() for value in values),
    *(("one", name, value) for name, values in FIELDS.items() for value in values),
    *(("two", name, value) for name, values in BATCH.items() for value in values),
]
# What SGLang serves, and a strict reading of its annotations would refuse.
RIGHT: list[dict[str, Any]] = [
    {"max_new_tokens": 4, "temperature": None, "top_p": None, "stop": None, "ignore_eos": None},
    {"max_new_tokens": 4, "logit_bias": {"5": -1, "6": 2.5}},
    {"max_new_tokens": 4, "custom_params": {"x": [None, 1.5], "y": {"z": True}}, "n": 2},
]
if OWN_STEP:  # SGLang 0.5.23 refuses these itself
    RIGHT += [
        {"max_new_tokens": 4.0, "temperature": 0, "top_k": 1.0},
        {"max_new_tokens": 4, "stop_token_ids": [None, "5", 6], "stop": []},
        {"max_new_tokens": 4, "ignore_eos": 1},
        {"max_new_tokens": 4, "custom_params": {"x": [None, {"y": [[]]}]}},
        {"max_new_tokens": True},
    ]


# Requests that steer the server, or that reach no generation, and what the refusal names.
ELSEWHERE: list[tuple[str, Any, str]] = [
    ("/start_expert_distribution_record", {}, "experts"),
    ("/start_profile", {"output_dir": "/proc/x/y", "num_steps": 1}, "output_dir"),
    ("/start_profile", {"profile_prefix": "a/b", "num_steps": 1}, "profile_prefix"),
    ("/start_profile", {"activities": ["RPD"], "num_steps": 1}, "activities"),
    ("/stop_profile", None, "not in progress"),
    ("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": None}}, "pp_max"),
    ("/set_internal_state", {"server_args": {"tp_size": 2}}, "tp_size"),
    ("/set_internal_state", {"server_args": {"speculative_accept_threshold_single": 0.2}}, "lossy"),
    ("/set_internal_state", {"server_args": {"speculative_accept_threshold_acc": 0}}, "lossy"),
    ("/slow_down", {"forward_sleep_time": NAN}, "forward_sleep_time"),
    ("/release_memory_occupation", {"tags": ["x"]}, "tags"),
    ("/resume_memory_occupation", {}, "not released"),
    ("/update_weights_from_disk", {"model_path": "x", "load_format": "x"}, "load_format"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "IndexError"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, "UnpicklingError"),
    ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "group"),
    ("/send_weights_to_remote_instance", {"master_address": "x", "ports": "1"}, "group"),
    ("/send_weights_to_remote_instance", {"master_address": "x", "ports": "1,2"}, "ports"),
    ("/get_weights_by_name", {"name": "x", "rid": ["x"]}, "failed" if OWN_STEP else "rid"),
    ("/configure_logging", {"log_level": "x"}, "log_level"),
    ("/configure_logging", {"log_requests_level": 9}, "log_requests_level"),
    ("/parse_function_call", {"text": "x"}, "tool_call_parser"),
    ("/separate_reasoning", {"text": "x", "reasoning_parser": "x"}, "reasoning_parser"),
    ("/vertex_generate", {"instances": [{"text": "x"}], "parameters": {"y": 1}}, "parameters"),
    ("/v1/detokenize", {"tokens": [-1]}, "tokens"),
    ("/v1/responses", {}, "input"),
    ("/v1/chat/completions", {"model": "x", "messages": [], "response_format": 1}, "response_f"),
    ("/v1/completions", {"model": "x", "prompt": ["x"], "extra_key": ["x"]}, "extra_key"),
    ("/remove_external_corpus", [], "body"),
    ("/add_external_corpus", 5, "body"),
    ("/add_external_corpus", {"surplus": NAN}, "surplus" if OWN_STEP else "not JSON"),
    ("/v1/messages/count_tokens", {"model": "x", "messages": []}, "messages"),
    (
        "/v1/messages",
        {"model": "x", "max_tokens": 2**63, "messages": [{"role": "user", "content": "x"}]},
        "max_new_tokens",
    ),
    ("/api/chat", {"model": "x", "messages": []}, "messages"),
    ("/api/generate", {"model": "x", "prompt": "x", "options": {"temperature": -1}}, "temperature"),
    ("/encode", {"text": ["x"], "rid": "x"}, "embedding"),
]


@pytest.fixture(scope="module")
def right(reference: Client) -> list[int]:
    ids: list[int] = reference.generate(PROMPT)["output_ids"]
    return ids


PROMPT = chat(held_out("word", 1, seed=11)[0].prompt)


@pytest.fixture
def still_right(server: Client, right: list[int]) -> Iterator[None]:
    """After the test, the server is alive, has lost no slot and answers as the reference."""
    yield
    assert server.server.alive, server.server.tail(60)
    server.flush()  # SGLang's checks of its memory run when it is idle
    assert server.generate(PROMPT)["output_ids"] == right


def body_of(kind: str, name: str, value: Any) -> dict[str, Any]:
    if kind == "sampling_params":
        return {"text": "x", "sampling_params": {"max_new_tokens": 2, name: value}}
    if kind == "two":
        return {"text": ["x", "y"], name: value}
    prompt = {} if name in ("input_ids", "input_embeds") else {"text": "x"}
    return {**prompt, name: value}


def post(server: Client, path: str, body: Any) -> requests.Response:
    data = json.dumps(body)  # `requests` itself refuses NaN
    headers = {"content-type": "application/json"}
    return requests.post(f"{server.url}{path}", data=data, headers=headers, timeout=60)


def names(answer: requests.Response, field: str) -> bool:
    """Whether it names the field, or what is wrong with JSON. SGLang 0.5.23 names types alone."""
    said = (field, "surrogate", *(() if OWN_STEP else ("invalid type", "JSON decode error")))
    return any(name.lower() in answer.text.lower() for name in said)


@contextmanager
def new_weights(server: Client) -> Iterator[None]:
    """Weights may be sent here. SGLang 0.5.23 takes them between two requests."""
    if not OWN_STEP:
        assert post(server, "/begin_weight_update", {}).status_code == 200
    yield
    if not OWN_STEP:
        assert post(server, "/end_weight_update", {}).status_code == 200


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_each_wrong_field_is_named(server: Client) -> None:
    failed = []
    alone = [(name, body_of(kind, name, value)) for kind, name, value in WRONG]
    for name, body in [*alone, *TOGETHER]:
        answer = post(server, "/generate", body)
        if answer.status_code != 400 or not names(answer, name):
            failed.append((body, answer.status_code, answer.text[:200]))
    assert not failed, "\n".join(map(str, failed))


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_what_sglang_serves_is_served(server: Client) -> None:
    for params in RIGHT:
        answer = post(server, "/generate", {"text": "def f(", "sampling_params": params})
        assert answer.status_code == 200, (params, answer.text)
    batch = {
        "text": ["x", "y"],
        "rid": ["bad-a", "bad-b"],
        "return_logprob": [True, False],
        "token_ids_logprob": [[1], [2, 3]],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        "image_data": [],
    }
    answers = post(server, "/generate", batch)
    assert [a["meta_info"]["completion_tokens"] for a in answers.json()] == [2, 3], answers.text


@pytest.mark.ci
@on("auto")
@pytest.mark.usefixtures("still_right")
def test_no_false_value_is_an_error_of_the_server(server: Client) -> None:
    """It is served, or HTTP 400 (422 by FastAPI)."""
    bodies = Bodies(requests.get(f"{server.url}/openapi.json", timeout=60).json())
    asked = list(false_cases(bodies))
    assert len(asked) > 1_000
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: failure(server, case, seconds=120), asked))
    wrong = [f"{case}: {why}" for case, why in zip(asked, found, strict=True) if why]
    assert not wrong, "\n".join(wrong)


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_other_endpoints_say_what_is_wrong(server: Client) -> None:
    failed = []
    with new_weights(server):
        for path, body, named in ELSEWHERE:
            answer = post(server, path, body)
            if answer.status_code != 400 or not names(answer, named):
                failed.append((path, body, answer.status_code, answer.text[:200]))
    assert not failed, "\n".join(map(str, failed))
    assert requests.get(f"{server.url}/v1/loads?include=x", timeout=60).status_code == 400


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_weights_that_cannot_be_taken(server: Client) -> None:
    """They are out of the server's reach, or of another shape."""
    for shared_by, named in (("file_descriptor", "Authentication"), ("file_system", "Assertion")):
        weights = serialised([("model.norm.weight", torch.zeros(2))], shared_by)
        body = {"serialized_named_tensors": [weights]}
        with new_weights(server):
            answer = post(server, "/update_weights_from_tensor", body)
        assert answer.status_code == 400, answer.text
        assert named in answer.text


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_memory_is_not_released_under_an_answer(server: Client) -> None:
    """SGLang's scheduler ends in an assertion. The answer is the one that it is alone."""
    alone = server.generate("def f(", max_new_tokens=160, ignore_eos=True)["output_ids"]
    answers = server.stream("def f(", max_new_tokens=160, ignore_eos=True)
    next(answers)
    refused = post(server, "/release_memory_occupation", {})
    *_, last = answers
    assert last["output_ids"] == alone
    assert refused.status_code == 400, refused.text
    assert "running" in refused.text


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_a_session_begins_anew(server: Client) -> None:
    """`replace` without `rid` forgets the history, also where two requests had one id."""
    session = server.post("/open_session", {"capacity_of_str_len": 1000}).json()
    short: dict[str, Any] = {"max_new_tokens": 4}
    first = server.generate("def f(", **short)["output_ids"]
    for rid in ("twice", "twice", "anew"):
        asked = {"id": session, "replace": rid == "anew"}
        answer = server.generate("def f(", session_params=asked, rid=rid, **short)
        assert answer["output_ids"] == first
    assert server.post("/close_session", {"session_id": session}).status_code < 500


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_a_refused_request_leaves_its_id(server: Client) -> None:
    """SGLang knows the request by then, and would refuse the id for ever."""
    long, params = [5] * 40_000, {"max_new_tokens": 2}
    for refused, served in (
        ({"input_ids": long}, {"input_ids": [5]}),
        ({"input_ids": [[5], long]}, {"input_ids": [[5], [6]]}),
        ({"input_ids": [long, [5]]}, {"input_ids": [[5], [6]]}),
    ):
        one = not isinstance(served["input_ids"][0], list)
        for answers in (1, 2):
            sampling = params | {"n": answers}
            rid = {"rid": "again" if one else ["again-a", "again-b"]}
            for _ in range(2):
                body = {**refused, **rid, "sampling_params": sampling}
                answer = post(server, "/generate", body)
                assert answer.status_code == 400
                assert "longer than" in answer.text
            answer = post(server, "/generate", {**served, **rid, "sampling_params": sampling})
            assert answer.status_code == 200, answer.text


@on("auto")
@pytest.mark.usefixtures("still_right")
def test_a_stream_says_so(server: Client) -> None:
    """SGLang has begun a stream before it looks at the request."""
    body = {"text": "x", "stream": True, "sampling_params": {"stop_regex": "("}}
    assert '"code":400' in post(server, "/generate", body).text
    body = {"model": "x", "prompt": "x", "stream": True, "options": {"stop": 1}}
    assert post(server, "/api/generate", body).status_code == 400


# What SGLang refuses after an endpoint has taken it: the prompt, or this temperature.
LATE: list[tuple[str, str, dict[str, Any]]] = [
    ("/generate", "text", {"sampling_params": {"temperature": -5}}),
    ("/v1/completions", "prompt", {"model": "x", "temperature": -5}),
    ("/v1/chat/completions", "messages", {"model": "x", "temperature": -5}),
    ("/v1/messages", "messages", {"model": "x", "max_tokens": 4, "temperature": -5}),
    ("/v1/responses", "input", {"model": str(TARGET), "temperature": -5}),
    ("/api/chat", "messages", {"model": "x", "options": {"temperature": -5}}),
    ("/api/generate", "prompt", {"model": "x", "options": {"temperature": -5}}),
    ("/invocations", "messages", {"model": "x", "temperature": -5}),
]
# What says so in a stream. The others answer with HTTP 400 before it begins.
IN_STREAMS = {"/generate": '"code":400', "/v1/responses": "event: error\n"}
if not OWN_STEP:
    IN_STREAMS |= {"/v1/responses": "event: response.failed\n", "/v1/messages": "event: error\n"}


@on("auto")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("still_right")
def test_each_api_names_a_late_error(server: Client, stream: bool) -> None:
    for path, field, cold in LATE:
        steering = {"temperature", "sampling_params", "options"}
        fine = {name: value for name, value in cold.items() if name not in steering}
        for text, options, named in (
            ("x", cold, "temperature must be"),
            ("def f( " * 20_000, fine, "longer than"),
        ):
            prompt = [{"role": "user", "content": text}] if field == "messages" else text
            answer = post(server, path, {**options, field: prompt, "stream": stream})
            assert named in answer.text, (path, answer.status_code, answer.text[:300])
            if stream and path in IN_STREAMS:
                assert IN_STREAMS[path] in answer.text
            else:
                assert answer.status_code == 400


@on("auto")
def test_openai_reads_the_error_of_a_stream(server: Client) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = str(TARGET)
    *_, last = client.responses.create(model=model, input="x", stream=True, temperature=-5)
    assert last.type == ("error" if OWN_STEP else "response.failed")
    assert "temperature must be" in str(last)


@on("auto")
@pytest.mark.parametrize(
    "examples",
    [100, pytest.param(200, marks=pytest.mark.ci), pytest.param(2_000, marks=pytest.mark.full)],
)
@pytest.mark.usefixtures("still_right")
def test_no_request_is_an_error_of_the_server(server: Client, examples: int) -> None:
    fuzz(server, examples)


@on("no tokenizer")
def test_a_server_without_a_tokenizer(server: Client, reference: Client) -> None:
    """It takes tokens, and says so of requests for text."""
    ids = [13, 790, 368]
    served, alone = (client.generate(ids, max_new_tokens=24) for client in (server, reference))
    assert served["output_ids"] == alone["output_ids"]
    for path, field, _ in LATE[1:]:
        said = [{"role": "user", "content": "x"}] if field == "messages" else "x"
        answer = post(server, path, {"model": "x", "max_tokens": 4, field: said})
        assert answer.status_code == 400, (path, answer.text)
        assert "--skip-tokenizer-init" in answer.text
    fuzz(server, 1_000)
