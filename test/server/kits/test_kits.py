"""Every kit that SGLang ships for a server like ours, on servers of test/servers.py."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang.test.kits import basic_scheduler_stress_kit as stress_kit
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.radix_cache_server_kit import gen_radix_tree
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
    _greedy,
)
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

from sglang_dflash.tiny.prompts import Example, held_out
from test.server.kits.conftest import Kit
from test.servers import Client, chat
from training.data import final_answer

WORD = held_out("word", 8, seed=31)
RECORD = held_out("json", 1, seed=31)[0]
PERSON = chat(
    "Write a JSON record with the fields name, age, city. "
    "Rita Berg is 54 years old, lives in Rome and likes chess and hiking."
)

pytestmark = pytest.mark.ci


def bounded(grammar: str) -> str:
    """Of characters at most twelve, of blanks and fields at most two."""
    grammar = re.sub(r"(?<=[a-z0-9 ]\])\+", "{1,12}", grammar)
    return re.sub(r"(?<=[\])s])\*", "{0,2}", grammar)


class TestAPIContract(BasicAPIContractMixin, Kit):
    pass


class TestDecodeCorrectness(BasicDecodeCorrectnessMixin, Kit):
    sanity_max_new_tokens_long = 160

    def solve(self, example: Example) -> None:
        text = self._decode_generate(chat(example.prompt), self.sanity_max_new_tokens_long)
        assert final_answer(text) == example.check

    def test_capital_france(self) -> None:
        """World knowledge: a held-out word problem instead."""
        self.solve(WORD[0])

    def test_basic_math(self) -> None:
        """Mental arithmetic: a held-out word problem with its working instead."""
        self.solve(WORD[1])

    def test_color_completion(self) -> None:
        """World knowledge: a held-out record instead."""
        text = self._decode_generate(chat(RECORD.prompt), self.sanity_max_new_tokens_long)
        assert json.loads(text) == RECORD.check


class TestSchedulerStress(BasicSchedulerStressMixin, Kit):
    sanity_max_new_tokens_short = 160
    test_long_prompt = pytest.mark.full(BasicSchedulerStressMixin.test_long_prompt)

    def test_streaming_response(self) -> None:
        """World knowledge: a held-out word problem instead."""
        body = {
            "text": chat(WORD[0].prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 160},
            "stream": True,
        }
        with requests.post(f"{self.base_url}/generate", json=body, stream=True) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines(decode_unicode=True) if line]
        assert lines.pop() == "data: [DONE]"
        texts = [json.loads(line.removeprefix("data:"))["text"] for line in lines]
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert final_answer(texts[-1]) == WORD[0].check

    def test_concurrent_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """World knowledge: eight held-out word problems instead."""
        questions = [(chat(e.prompt), f"the answer is {e.check}.") for e in WORD]
        monkeypatch.setattr(stress_kit, "_CONCURRENT_PREFIX", "")  # the chat format is shared
        monkeypatch.setattr(stress_kit, "_CONCURRENT_QA", questions)
        super().test_concurrent_requests()


class TestMatchedStop(MatchedStopMixin, Kit):
    def test_finish_stop_eos(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Llama's EOS ids and chat format: the bundled target's own instead."""
        ours = {"matched_stop": self.tokenizer.eos_token_id}
        self.replace(
            monkeypatch, "_run_completions_generation", prompt=chat(WORD[0].prompt), **ours
        )
        self.replace(monkeypatch, "_run_chat_completions_generation", prompt=WORD[0].prompt, **ours)
        super().test_finish_stop_eos()


class TestEBNF(EBNFConstrainedMixin, Kit):
    def _run_decode_ebnf(self, ebnf: str, **asked: Any) -> None:
        """Repetition without end: bounded, for the bundled target can fill 128 tokens with one."""
        super()._run_decode_ebnf(ebnf=bounded(ebnf), **asked)

    def test_ebnf_generate_complex_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """World knowledge: the prompt states the facts."""
        ebnf = r"""
        root ::= "{\"name\": " text ", \"age\": " [1-9] [0-9]* ", \"city\": " text "}"
        text ::= "\"" [a-zA-Z0-9 ]+ "\""
        """
        self.replace(monkeypatch, "_run_decode_ebnf", ebnf=ebnf, prompt=PERSON)
        super().test_ebnf_generate_complex_json()


class TestJSON(JSONConstrainedMixin, Kit):
    json_schema = json.dumps(  # the kit's, without repetition without end
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": r"^\w{1,12}$"},
                "population": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
            },
            "required": ["name", "population"],
            "additionalProperties": False,
        }
    )


class TestRegex(RegexConstrainedMixin, Kit):
    def _run_decode_regex(self, regex: str, **asked: Any) -> None:
        """Repetition without end: bounded, for the bundled target can fill 128 tokens with one."""
        super()._run_decode_regex(regex=bounded(regex), **asked)

    def test_regex_generate_complex_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """World knowledge: the prompt states the facts."""
        self.replace(monkeypatch, "_run_decode_regex", prompt=PERSON)
        super().test_regex_generate_complex_json()


class TestAbortAll(AbortAllMixin, Kit):
    pass


class TestPause(PauseResumeInPlaceMixin, Kit):
    pause_num_requests, pause_max_new_tokens, pause_duration = 16, 96, 2


class TestPrefixCacheBranching(PrefixCacheBranchingMixin, Kit):
    def test_prefix_cache_branching(self) -> None:
        """Hits of a recurrent state's cache, which a radix cache has one request earlier."""
        self.flush_cache()
        shared = "hi" * 257
        tokens = len(self.tokenizer.encode(shared))
        for i, word in enumerate(("this", "here", "that")):
            meta = self.send_request_helper(shared + " " + word * 64)["meta_info"]
            assert meta["cached_tokens"] == (tokens if i else 0)


class TestRadixCache(Kit):
    """The kits `cache_hit` and `radix_cache_server`: functions, not mixins."""

    def test_multiturn_cache_hits(self, tmp_path: Path) -> None:
        turns = [{"value": e.prompt} for e in (WORD[0], RECORD)]
        dataset = tmp_path / "conversations.json"  # in place of a download
        dataset.write_text(json.dumps([{"conversations": turns}] * 32))
        found = run_multiturn_cache_hit_test(
            self.base_url,
            self.model,
            num_clients=4,
            request_length=96,
            dataset_path=str(dataset),
        )
        assert found["overall"]["cache_hit_rate"] > 0.5


class TestSpecCorrectness(SpecCorrectnessKit, Kit):
    def accept_length(self, prompts: list[str], **options: Any) -> float:
        """SGLang's own figure: completion tokens per verify step, prefill's included."""
        body = {"text": prompts, "sampling_params": {"temperature": 0, **options}}
        metas = [answer["meta_info"] for answer in self.client.post("/generate", body).json()]
        steps = sum(meta.get("spec_verify_ct", 0) for meta in metas)
        assert (steps > 0) == self.dflash
        return sum(meta["completion_tokens"] for meta in metas) / steps if steps else float("inf")

    def test_acc_length(self) -> None:
        """A fixed accept length on a FastAPI server: a held-out word problem instead."""
        length = self.accept_length([chat(WORD[0].prompt)] * 5, max_new_tokens=512)
        assert length > self.acc_length_thres

    def test_batch_generation(self) -> None:
        """A fixed accept length on world knowledge: four word problems instead."""
        length = self.accept_length([chat(e.prompt) for e in WORD[:4]], max_new_tokens=50)
        assert length > self.batch_accept_len_thres

    def test_eos_token(self) -> None:
        """1,024 tokens in Llama's chat format: a chat answer that ends in EOS instead."""
        answer = self.client.generate(
            chat(WORD[0].prompt), temperature=0.1, max_new_tokens=512, skip_special_tokens=False
        )
        eos = self.tokenizer.eos_token_id
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
        assert eos not in self.tokenizer.encode(answer["text"])


class TestSpecParity(SpecParityKit, Kit):
    @pytest.fixture(autouse=True)
    def answers(self, reference: Client) -> None:
        """In place of the kit's `setUpClass`, which starts its reference for a GPU."""
        self.parity_ref_outputs = {p: _greedy(reference.url, p) for p in self.parity_prompts}


class TestSpecLogprob(SpecLogprobKit, Kit):
    test_logprob_mixed = pytest.mark.full(SpecLogprobKit.test_logprob_mixed)


class TestSpecPenalty(SpecPenaltyKit, Kit):
    run_decode = SpecEagleServerBase.run_decode


class TestSpecFeature(SpecFeatureKit, Kit):
    send_request = SpecEagleServerBase.send_request
    send_requests_abort = SpecEagleServerBase.send_requests_abort
    test_request_abort = pytest.mark.full(SpecFeatureKit.test_request_abort)

    def test_radix_attention(self) -> None:
        """Token ids to 31,999 and 50,000 new tokens: a smaller tree of the bundled vocabulary."""
        nodes = gen_radix_tree(num_nodes=40, chunk_len=32)
        body = {
            "input_ids": [[i % 2048 for i in node["input_ids"]] for node in nodes],
            "sampling_params": [
                {"max_new_tokens": min(node["decode_len"], 32), "temperature": 0} for node in nodes
            ],
        }
        assert self.client.post("/generate", body).status_code == 200

    def test_constrained_decoding(self) -> None:
        """A JSON of any length: a held-out record instead."""
        answer = self.client.post(
            "/v1/chat/completions",
            {
                "model": self.model,
                "messages": [{"role": "user", "content": RECORD.prompt}],
                "temperature": 0,
                "max_tokens": 128,
                "response_format": {"type": "json_object"},
            },
        )
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == RECORD.check


class TestWaitingTimeout(WaitingTimeoutMixin, Kit):
    servers = ("short wait", "no speculation, short wait")


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, Kit):
    servers = ("short run", "no speculation, short run")
    running_timeout_sleep = 1
