"""LoRA adapters over HTTP: they come and go, and a wrong one never ends a server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from test.plugins import distribution
from test.server.fuzzing import fuzz
from test.server.tensors import serialised
from test.servers import ADAPTERS, FULL, Client, running, with_adapters

Damage = Callable[[Path], Any]
FOUR = {"max_new_tokens": 4}
SEEN = {"max_new_tokens": 40, "temperature": 0}
TOO_LONG = [5] * 40_000
SECONDS_TO_UNLOAD = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Client]:
    few = "--max-running-requests", "2"  # so that others wait
    with running(*FULL, *few, *with_adapters(folder), dflash=True) as client:
        yield client


def config(**fields: Any) -> Damage:
    def damage(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def text(content: str) -> Damage:
    return lambda adapter: (adapter / "adapter_config.json").write_text(content)


def without(file: str) -> Damage:
    return lambda adapter: (adapter / file).unlink()


def weight(part: str, change: Callable[[Tensor], Tensor] | None) -> Damage:
    """Change the first tensor whose name has this part; None takes it away."""

    def damage(adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        weights = load_file(file)
        name = next(name for name in weights if part in name)
        old = weights.pop(name)
        if change is not None:
            weights[name] = change(old)
        save_file(weights, file, metadata={"format": "pt"})

    return damage


def named(name: str) -> Damage:
    """Add a tensor of another name."""

    def damage(adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        weights = load_file(file) | {f"base_model.model.model.{name}": torch.zeros(16, 7)}
        save_file(weights, file, metadata={"format": "pt"})

    return damage


def truncated(adapter: Path) -> None:
    os.truncate(adapter / "adapter_model.safetensors", 1000)


REFUSED: dict[str, Damage] = {
    "no config": without("adapter_config.json"),
    "no JSON": text("junk"),
    "a list": text("[]"),
    "an empty config": text("{}"),
    "no weights": without("adapter_model.safetensors"),
    "half a file": truncated,
    "a rank of 999": config(r=999),
    "a rank of 0": config(r=0),
    "a rank in words": config(r="x"),
    "a rank of other weights": config(r=5),
    "no such module": config(target_modules=["nope"]),
    "modules of no type": config(target_modules=5),
    "another width": weight("q_proj.lora_A", lambda a: a[:, :7].contiguous()),
    "another height": weight("down_proj.lora_B", lambda b: b[:9].contiguous()),
    "too tall": weight("q_proj.lora_B", lambda b: torch.cat([b, b])),
    "too wide": weight("down_proj.lora_A", lambda a: torch.cat([a, a], dim=1)),
    "a vector": weight("down_proj.lora_B", lambda b: b[:, 0].contiguous()),
    "no such layer": named("layers.99.self_attn.q_proj.lora_A.weight"),
    "a narrow vocabulary": weight("lora_embedding_A", lambda a: a[:, :7].contiguous()),
    "NaN": weight("o_proj.lora_A", lambda a: a * float("nan")),
    "infinity": weight("o_proj.lora_B", lambda b: b + float("inf")),
}
SERVED_OR_REFUSED: dict[str, Damage] = {
    "a scale in words": config(lora_alpha="x"),
    "RSLoRA": config(use_rslora=True),
    "DoRA": config(use_dora=True),
    "no A": weight("o_proj.lora_A", None),
    "no B": weight("down_proj.lora_B", None),
    "no A of V": weight("v_proj.lora_A", None),
    "FP8": weight("o_proj.lora_A", lambda a: a.to(torch.float8_e4m3fn)),
    "whole numbers": weight("o_proj.lora_A", lambda a: a.to(torch.int64)),
    "no such projection": named("layers.0.zzz.lora_A.weight"),
}


def test_damaged_adapters(server: Client, folder: Path) -> None:
    """SGLang's scheduler ends at the first request that uses one."""
    alone = server.generate("def f(", **FOUR)["output_ids"]
    failed = []
    for name, damage in (REFUSED | SERVED_OR_REFUSED).items():
        path = folder / "damaged"
        shutil.copytree(folder / "wide", path)
        damage(path)
        asked = {"lora_name": name, "lora_path": str(path)}
        loaded = server.post("/load_lora_adapter", asked)
        shutil.rmtree(path)
        if loaded.status_code == 200 and name in SERVED_OR_REFUSED:
            body = {"text": "def f(", "lora_path": name, "sampling_params": FOUR}
            loaded = server.post("/generate", body)
            unloaded = server.post("/unload_lora_adapter", {"lora_name": name})
            expected = loaded.status_code == unloaded.status_code == 200
        else:
            expected = loaded.status_code == 400
        if not expected:
            failed.append((name, loaded.status_code, loaded.text[:300]))
        assert server.server.alive, (name, server.server.tail(60))
    assert not failed, "\n".join(map(str, failed))
    assert server.generate("def f(", **FOUR)["output_ids"] == alone


def test_adapters_from_tensors(server: Client, folder: Path) -> None:
    """The same adapter answers alike, and tensors that are none end no server."""
    path = folder / "narrow"
    weights = load_file(path / "adapter_model.safetensors")
    fields = json.loads((path / "adapter_config.json").read_text())

    def load(tensors: str, config: dict[str, Any] = fields) -> int:
        body = {"lora_name": "sent", "config_dict": config, "serialized_tensors": tensors}
        return server.post("/load_lora_adapter_from_tensors", body).status_code

    for wrong in ("", "x", "\0", "AAAA", serialised(5), serialised([]), serialised({"x": 1})):
        assert load(wrong) == 400, wrong
        assert server.server.alive, server.server.tail(60)
    name = next(iter(weights))
    for changed in (weights[name] * float("nan"), weights[name][:, :3]):
        assert load(serialised(weights | {name: changed})) == 400
    assert load(serialised(weights), {}) == load(serialised(weights), fields | {"r": 5}) == 400
    assert load(serialised(weights, "file_descriptor")) == 400  # the server's family alone can read
    assert load(serialised(weights)) == 200
    answers = [
        server.post("/generate", {"text": "def f(", "lora_path": adapter, "sampling_params": SEEN})
        for adapter in ("narrow", "sent", None)
    ]
    sent, same, none = (answer.json()["output_ids"] for answer in answers)
    assert sent == same != none
    assert server.post("/unload_lora_adapter", {"lora_name": "sent"}).status_code == 200


@pytest.mark.parametrize("path", ["/nope", "x", "", "/etc"])
def test_no_adapter_there(server: Client, path: str) -> None:
    answer = server.post("/load_lora_adapter", {"lora_name": "another", "lora_path": path})
    assert answer.status_code == 400


def test_an_adapter_goes_when_its_requests_have_ended(server: Client, folder: Path) -> None:
    """SGLang counts uses of an adapter, too few with `n`, too many where it refuses a request."""
    code, other = "def f(", "x"
    both = ["wide", "narrow"]
    for body, status in (
        ({"text": code, "lora_path": "wide", "sampling_params": FOUR}, 200),
        ({"text": code, "lora_path": "wide", "sampling_params": FOUR | {"n": 2}}, 200),
        ({"text": [code, other], "lora_path": both, "sampling_params": FOUR | {"n": 2}}, 200),
        ({"input_ids": TOO_LONG, "lora_path": "wide"}, 400),
        ({"input_ids": TOO_LONG, "lora_path": "wide", "sampling_params": {"n": 2}}, 400),
        ({"input_ids": [TOO_LONG, [5]], "lora_path": both, "sampling_params": FOUR}, 400),
        ({"input_ids": [[5], TOO_LONG], "lora_path": both, "sampling_params": FOUR}, 400),
        ({"text": code, "lora_path": "nope"}, 400),
    ):
        answer = server.post("/generate", body)
        assert answer.status_code == status, (body, answer.text)
    for name in ADAPTERS:
        answer = server.post("/unload_lora_adapter", {"lora_name": name}, SECONDS_TO_UNLOAD)
        assert answer.status_code == 200, answer.text
        asked = {"lora_name": name, "lora_path": str(folder / name)}
        assert server.post("/load_lora_adapter", asked).status_code == 200


def test_an_adapter_goes_when_a_waiting_request_has_left(server: Client, folder: Path) -> None:
    """SGLang keeps the use of an adapter by a request that is aborted in the queue."""
    long = [server.stream("def f(", max_new_tokens=4_000, ignore_eos=True) for _ in range(2)]
    for answers in long:
        next(answers)
    for n in (1, 2):
        params = FOUR | {"n": n}
        body = {"text": ["x", "y"], "lora_path": "narrow", "sampling_params": params}
        with pytest.raises(requests.Timeout):
            requests.post(f"{server.url}/generate", json=body, timeout=2)
    unloaded = server.post("/unload_lora_adapter", {"lora_name": "narrow"}, SECONDS_TO_UNLOAD)
    assert unloaded.status_code == 200
    for answers in long:
        answers.close()  # type: ignore[attr-defined]
    server.flush()
    asked = {"lora_name": "narrow", "lora_path": str(folder / "narrow")}
    assert server.post("/load_lora_adapter", asked).status_code == 200
    served = {"text": "x", "lora_path": "narrow", "sampling_params": FOUR}
    assert server.post("/generate", served).status_code == 200


@pytest.mark.parametrize("examples", [50, pytest.param(1_000, marks=pytest.mark.full)])
def test_no_request_is_an_error_of_the_server(server: Client, examples: int) -> None:
    fuzz(server, examples)


ONE_RANK_FAILS = """
    def plugin():
        from sglang.srt.distributed import get_tp_group
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def fail(result, manager, ref, *args):
            if get_tp_group().rank_in_group == 1 and ref.lora_name == "another":
                raise ValueError("rank 1 cannot")

        loader = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights"
        HookRegistry.register(loader, fail, HookType.AFTER)
"""


@pytest.mark.ci
def test_all_ranks_load_an_adapter_or_none(folder: Path, tmp_path: Path) -> None:
    """SGLang answers for rank 0, and the other rank crashes when the adapter is used."""
    plugin = distribution(tmp_path, "failing", "1.0", ONE_RANK_FAILS)
    flags = *FULL, "--tp", "2", *with_adapters(folder)
    with running(*flags, dflash=True, environment={"PYTHONPATH": str(plugin)}) as server:
        asked = {"lora_name": "another", "lora_path": str(folder / "narrow")}
        for _ in range(2):
            refused = server.post("/load_lora_adapter", asked)
            assert refused.status_code == 400
            assert "rank 1 cannot" in refused.text
        body = {"text": "def f(", "lora_path": "narrow", "sampling_params": SEEN}
        assert server.post("/generate", body).status_code == 200
        assert server.post("/load_lora_adapter", asked | {"lora_name": "x"}).status_code == 200
        answers = [
            server.post("/generate", body | {"lora_path": n}).json() for n in ("x", "narrow")
        ]
        assert answers[0]["output_ids"] == answers[1]["output_ids"]
