"""The rest of the API: streams, n, echo, sessions, pauses, metrics, sampling."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from typing import Any

import pytest
import requests
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from scipy.stats import chisquare
from tokenizers import Tokenizer

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test import releases
from test.precision import LOGPROB_BOUND
from test.server.conftest import on
from test.servers import TWO_RANKS, Client, chat

TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
WORD = held_out("word", 4, seed=9)
CODE = held_out("code", 2, seed=9)
LONG = {"max_new_tokens": 160, "ignore_eos": True}
PAUSED = LONG | {"max_new_tokens": 600}  # longer than a request to pause takes


@pytest.fixture
def openai(server: Client) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def scraped(server: Client) -> dict[str, list[Sample]]:
    """The samples of a server's metrics, by name."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def by_position(samples: dict[str, list[Sample]], what: str) -> list[float]:
    found = {
        int(sample.labels["position"]): sample.value
        for sample in samples.get(f"sglang:spec_{what}_tokens_per_position_total", [])
    }
    return [found.get(position, 0.0) for position in range(1, 16)]


def total(samples: dict[str, list[Sample]], name: str) -> float:
    return sum(sample.value for sample in samples.get(f"sglang:{name}", []))


@on(TWO_RANKS)
def test_loads_beside_metrics(server: Client) -> None:
    """SGLang's middleware for metrics fails on this path."""
    answer = requests.get(f"{server.url}/v1/loads", timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["loads"][0]["num_running_reqs"] == 0
    counted = [s.labels for s in scraped(server)["sglang:http_responses_total"]]
    assert "/v1/loads" in {labels["endpoint"] for labels in counted}


@on(TWO_RANKS)
def test_counters_and_metrics(server: Client) -> None:
    """meta_info and Prometheus agree with each other, with SGLang's counts and with the text."""
    before = scraped(server)
    metas = [server.generate(chat(e.prompt), max_new_tokens=70)["meta_info"] for e in WORD]
    after = scraped(server)

    def added(name: str) -> float:
        return total(after, name) - total(before, name)

    def at(what: str) -> list[float]:
        pairs = zip(by_position(after, what), by_position(before, what), strict=True)
        return [later - earlier for later, earlier in pairs]

    steps = sum(meta["spec_verify_ct"] for meta in metas)
    assert added("spec_verify_steps_total") == added("spec_verify_calls_total") == steps
    # Nothing else was asked of this server, or all of it has ended.
    assert total(after, "spec_verify_steps_total") == total(after, "spec_verify_calls_total")
    for position, accepted in enumerate(at("accepted"), start=1):
        assert accepted == sum(meta["spec_accepted_per_position"][position - 1] for meta in metas)
    verified = sum(meta["spec_num_proposed_drafts"] for meta in metas)
    assert at("drafted") == [steps] * 15
    assert sum(at("verified")) == verified
    assert added("spec_cut_tokens_total") == 15 * steps - verified
    assert added("spec_verify_width_tokens_sum") == verified + steps
    assert added("spec_accept_length_tokens_sum") == sum(at("accepted")) + steps
    assert added("spec_accept_length_tokens_count") == steps
    for part in releases.TIMED:
        assert added(f"spec_{part}_seconds_count") == steps
        assert added(f"spec_{part}_seconds_sum") > 0
    [sample] = after["sglang:spec_verify_steps_total"]  # one rank counts
    assert sample.labels["tp_rank"] == "0"
    [theirs] = after["sglang:spec_accept_length"]
    assert sample.labels == theirs.labels
    for meta in metas:
        accepted = meta["spec_num_correct_drafts"]
        assert sum(meta["spec_accepted_per_position"]) == accepted
        assert len(meta["spec_accepted_per_position"]) == 15
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(k * n for k, n in enumerate(histogram)) == accepted
        assert sum(histogram) == meta["spec_verify_ct"]
        in_last_step = meta["completion_tokens"] - 1 - accepted - meta["spec_verify_ct"]
        assert -releases.PAST_END <= in_last_step <= 0  # -1: it ended on an accepted draft
        assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]


@on(TWO_RANKS)
def test_stream_with_usage(server: Client, openai: OpenAI, reference: Client) -> None:
    """Chunks join to the whole answer; the last one holds the usage."""
    messages = [{"role": "user", "content": WORD[0].prompt}]
    options: dict[str, Any] = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = openai.chat.completions.create(**options)
    chunks = list(
        openai.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    plain = OpenAI(base_url=f"{reference.url}/v1", api_key="none").chat.completions.create(
        **options
    )
    assert whole.choices[0].message.content == plain.choices[0].message.content
    assert whole.usage.completion_tokens == plain.usage.completion_tokens


@on(TWO_RANKS)
def test_several_answers(server: Client, openai: OpenAI) -> None:
    """n > 1: greedy answers are equal, sampled ones differ."""
    messages: list[Any] = [{"role": "user", "content": "def main():"}]
    for temperature, distinct in ((0, 1), (1.5, 3)):
        answer = openai.chat.completions.create(
            model="default", messages=messages, temperature=temperature, n=3, max_tokens=30
        )
        assert len({choice.message.content for choice in answer.choices}) == distinct


@on(TWO_RANKS)
def test_echo(server: Client, openai: OpenAI) -> None:
    prompt = CODE[0].prompt
    answer = openai.completions.create(
        model="default", prompt=prompt, echo=True, temperature=0, max_tokens=8, logprobs=1
    ).choices[0]
    assert answer.text.startswith(prompt)
    assert answer.logprobs is not None
    assert answer.logprobs.tokens is not None
    assert len(answer.logprobs.tokens) > 8


@on(TWO_RANKS)
def test_conversation_hits_the_cache(server: Client, reference: Client, openai: OpenAI) -> None:
    """A second turn on a prefix hit says what the target says."""
    messages = [{"role": "user", "content": WORD[1].prompt}]
    plain = OpenAI(base_url=f"{reference.url}/v1", api_key="none")
    for question in (WORD[2].prompt, WORD[3].prompt):
        options: dict[str, Any] = {
            "model": "default",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 90,
        }
        ours = openai.chat.completions.create(**options).choices[0].message.content
        assert ours == plain.chat.completions.create(**options).choices[0].message.content
        messages = [
            *messages,
            {"role": "assistant", "content": ours},
            {"role": "user", "content": question},
        ]
    text = chat(WORD[1].prompt)
    server.generate(text)
    assert server.generate(text)["meta_info"]["cached_tokens"] > 0


@on(TWO_RANKS)
def test_session(server: Client, reference: Client) -> None:
    """A session continues its own history, as without speculation."""

    def talk(client: Client) -> list[str]:
        session = client.post("/open_session", {"capacity_of_str_len": 1000}).json()
        rid, said = None, []
        for text in (chat(WORD[0].prompt), "<|im_end|>\n" + chat(WORD[1].prompt)):
            answer = client.generate(
                text, session_params={"id": session, "rid": rid}, max_new_tokens=60
            )
            rid = answer["meta_info"]["id"]
            said.append(answer["text"])
        client.post("/close_session", {"session_id": session})
        return said

    assert talk(server) == talk(reference)


@on(TWO_RANKS)
@pytest.mark.parametrize(
    ("query", "items"), [("The answer is ", ["five", "six", "no"]), ([5, 6, 7], [[8, 9], [10]])]
)
def test_scores(server: Client, reference: Client, query: Any, items: list[Any]) -> None:
    body = {"model": "m", "query": query, "items": items, "label_token_ids": [20, 21, 22]}
    ours, theirs = (client.post("/v1/score", body) for client in (server, reference))
    assert ours.status_code == theirs.status_code == 200, ours.text
    pairs = zip(ours.json()["scores"], theirs.json()["scores"], strict=True)
    assert all(one == pytest.approx(other, rel=LOGPROB_BOUND) for one, other in pairs)


@pytest.fixture(scope="module")
def long_answer(reference: Client) -> list[int]:
    ids: list[int] = reference.generate(CODE[1].prompt, **PAUSED)["output_ids"]
    return ids


@on(TWO_RANKS)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(server: Client, long_answer: list[int], mode: str) -> None:
    """pause_generation in mid-answer changes nothing of the answer."""
    found: list[list[int]] = []
    answers = server.stream(CODE[1].prompt, **PAUSED)
    next(answers)
    thread = threading.Thread(target=lambda: found.append(list(answers)[-1]["output_ids"]))
    thread.start()
    try:
        assert server.post("/pause_generation", {"mode": mode}).status_code == 200
        time.sleep(0.5)
        assert not found, "the answer had ended before the pause"
    finally:
        assert server.post("/continue_generation").status_code == 200
    thread.join(timeout=120)
    assert found == [long_answer]


@on(TWO_RANKS)
def test_priorities(server: Client, reference: Client) -> None:
    """Requests of several priorities at once: each answer its own."""
    prompts = [chat(example.prompt) for example in WORD]
    expected = [reference.generate(prompt)["output_ids"] for prompt in prompts]
    results: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        body = {
            "text": prompts[i],
            "priority": i,
            "sampling_params": {"temperature": 0, "max_new_tokens": 64},
        }
        results[i] = server.post("/generate", body).json()["output_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(len(prompts))] == expected


@on(TWO_RANKS)
def test_bad_requests_are_refused(server: Client, openai: OpenAI) -> None:
    """HTTP 400 with a reason; the server goes on."""
    with pytest.raises(BadRequestError):
        openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "x"}], temperature=-1
        )
    stops = {"min_new_tokens": 3, "stop_token_ids": [2048]}
    for body in (
        {"text": "x", "return_hidden_states": True},
        {"input_ids": [5, 2048]},
        {"input_ids": [5, -1]},
        {"text": "x", "return_logprob": True, "token_ids_logprob": [7, 2048]},
        {"text": "x", "sampling_params": stops},
    ):
        answer = server.post("/generate", body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["message"]
    assert server.generate("x", max_new_tokens=2)["meta_info"]["completion_tokens"] == 2


@on(TWO_RANKS)
def test_sampled_answers_have_the_targets_distribution(server: Client, reference: Client) -> None:
    """500 answers over HTTP: their second token, the first that a block draws, chi-square."""
    prompt = "def _default_sysroot(cc):\n"
    first = reference.generate(prompt, max_new_tokens=1)
    begun = [*TOKENIZER.encode(prompt).ids, *first["output_ids"]]
    likely = reference.generate(begun, max_new_tokens=1, return_logprob=True, top_logprobs_num=20)
    top = likely["meta_info"]["output_top_logprobs"][0]
    expected = {token: math.exp(logprob) for logprob, token, _ in top}

    answers = [
        answer["output_ids"]
        for _ in range(5)
        for answer in server.generate_many(
            [prompt] * 100, max_new_tokens=2, temperature=1.0, ignore_eos=True
        )
    ]
    counts = Counter(second for begin, second in answers if begin == first["output_ids"][0])
    drawn = counts.total()
    assert drawn > 475
    tokens = [token for token, probability in expected.items() if probability * drawn >= 5]
    observed = [counts[token] for token in tokens]
    wanted = [expected[token] * drawn for token in tokens]
    observed.append(drawn - sum(observed))
    wanted.append(drawn - sum(wanted))
    assert chisquare(observed, wanted).pvalue > 0.001, (observed, wanted)


@on(TWO_RANKS)
def test_a_seed_has_one_answer(server: Client) -> None:
    """Also without `--enable-deterministic-inference`. The answers of one request differ."""
    options = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 2**62}

    def ask(**others: Any) -> list[tuple[int, ...]]:
        body = {"text": "def main(", "sampling_params": options | others}
        answered = server.post("/generate", body).json()
        answers = answered if isinstance(answered, list) else [answered]
        return [tuple(answer["output_ids"]) for answer in answers]

    assert ask() == ask()
    assert ask(n=3) == ask(n=3)
    assert len({*ask(n=3), *ask(sampling_seed=None), *ask(sampling_seed=None)}) == 5


@on(TWO_RANKS)
def test_logprobs_of_a_greedy_request_beside_a_sampled_one(
    server: Client, reference: Client
) -> None:
    """SGLang scales them by the request's temperature if any request of the batch is sampled."""
    greedy = {"temperature": 1.4, "top_k": 1, "max_new_tokens": 24}
    prompts = [chat(WORD[0].prompt), chat(WORD[1].prompt)]
    sampling = [greedy, {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}]
    body = {"text": prompts, "sampling_params": sampling, "return_logprob": True}
    ours = server.post("/generate", body).json()[0]["meta_info"]["output_token_logprobs"]
    alone = reference.generate(prompts[0], return_logprob=True, **greedy)
    theirs = alone["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
    assert all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(ours, theirs, strict=True))


@on(TWO_RANKS)
def test_streamed_logprobs(server: Client, openai: OpenAI) -> None:
    """Each streamed token has its own top logprobs, although a block brings several tokens."""
    ask: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": WORD[0].prompt}],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = openai.chat.completions.create(**ask).choices[0].logprobs.content
    before = total(scraped(server), "spec_verify_steps_total")
    chunks = [
        chunk.choices[0].logprobs.content
        for chunk in openai.chat.completions.create(**ask, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    assert total(scraped(server), "spec_verify_steps_total") - before < len(whole) / 2
    streamed = [token for chunk in chunks for token in chunk]
    assert [[t.token for t in token.top_logprobs] for token in streamed] == [
        [t.token for t in token.top_logprobs] for token in whole
    ]


@on(TWO_RANKS)
def test_a_streamed_stop_string_has_logprobs(openai: OpenAI) -> None:
    """Its text is cut off. Its tokens have logprobs all the same."""
    ask: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": WORD[0].prompt}],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    }
    text = openai.chat.completions.create(**ask).choices[0].message.content
    ask["stop"] = text[:20]
    whole = openai.chat.completions.create(**ask)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    streamed = [
        (token.token, chunk.usage.completion_tokens)
        for chunk in openai.chat.completions.create(**ask, stream=True, stream_options=usage)
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [t for t, _ in streamed] == [t.token for t in whole.choices[0].logprobs.content]
    assert streamed[-1][1] == whole.usage.completion_tokens
