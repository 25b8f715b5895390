"""New weights of the draft over HTTP, in each of SGLang's three calls, while requests run.

The draft gets bad weights and then its own again. Accept lengths show which it has. No answer
changes, and none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import init_custom_process_group
from torch import Tensor

from sglang_dflash.tiny.prompts import held_out
from sglang_dflash.tools.launch import free_port
from test.releases import OWN_STEP
from test.server.conftest import on
from test.server.tensors import serialised
from test.servers import TWO_RANKS, Client, chat

pytestmark = on("page 16, ahead", TWO_RANKS)

PROMPTS = [chat(each.prompt) for each in held_out("word", 4, seed=7)]
GROUP = "new weights"
LEFT_OUT = "norm.weight"


class Drafts:
    """The server's draft, and the same with bad weights, as a trainer has them."""

    def __init__(self, server: Client, folder: Path) -> None:
        info = server_info(server)
        self.ranks = info["tp_size"]
        self.good = Path(info["speculative_draft_model_path"])
        self.bad = changed(self.good, folder, lambda w: {k: v.flip(0) for k, v in w.items()})


def server_info(server: Client) -> dict[str, Any]:
    info: dict[str, Any] = requests.get(f"{server.url}/server_info", timeout=60).json()
    return info


def changed(
    draft: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Path:
    """A copy of a draft with other weights."""
    copytree(draft, folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):
        save_file(change(load_file(file)), file)
    return folder


@pytest.fixture(scope="module")
def drafts(server: Client, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    return Drafts(server, tmp_path_factory.mktemp("bad"))


@contextmanager
def session(server: Client) -> Iterator[None]:
    """SGLang 0.5.23 takes tensors between two requests."""
    if not OWN_STEP:
        assert server.post("/begin_weight_update", {"selector": "draft"}).status_code == 200
    yield
    if not OWN_STEP:
        assert server.post("/end_weight_update").status_code == 200


def named(folder: Path) -> dict[str, Tensor]:
    """A draft's weights, with the names by which this release tells them from the target's."""
    (file,) = folder.glob("*.safetensors")
    return {("draft." if OWN_STEP else "") + k: w for k, w in load_file(file).items()}


def by_folder(server: Client, drafts: Drafts, folder: Path, **fields: bool) -> requests.Response:
    body = {"model_path": str(folder), "selector": "draft"} | fields
    return server.post("/update_weights_from_disk", body)


def by_tensors(server: Client, drafts: Drafts, folder: Path, **fields: bool) -> requests.Response:
    texts = [serialised(list(named(folder).items())) for _ in range(drafts.ranks)]
    body = {"serialized_named_tensors": texts, "selector": "draft"} | fields
    with session(server):
        return server.post("/update_weights_from_tensor", body)


def by_group(server: Client, drafts: Drafts, folder: Path, **fields: bool) -> requests.Response:
    """As rank 0 of a group of processes, whose other ranks are the server's."""
    port, size = free_port(), 1 + drafts.ranks
    place = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": size,
        "group_name": GROUP,
        "backend": "gloo",
    }
    with ThreadPoolExecutor(1) as pool, session(server):
        joined = pool.submit(server.post, "/init_weights_update_group", place)
        group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=size,
            rank=0,
            group_name=GROUP,
        )
        assert joined.result().json()["success"], joined.result().text
        weights = named(folder)
        body: dict[str, Any] = {
            "names": list(weights),
            "dtypes": [str(w.dtype).removeprefix("torch.") for w in weights.values()],
            "shapes": [list(w.shape) for w in weights.values()],
            "group_name": GROUP,
            "selector": "draft",
        } | fields
        answer = pool.submit(server.post, "/update_weights_from_distributed", body)
        for weight in weights.values():
            torch.distributed.broadcast(weight.contiguous(), src=0, group=group)
        found = answer.result()
        left = pool.submit(server.post, "/destroy_weights_update_group", {"group_name": GROUP})
        torch.distributed.destroy_process_group(group)
        assert left.result().status_code == 200
    return found


WAYS = {"folder": by_folder, "tensors": by_tensors, "group": by_group}


def answers(server: Client) -> tuple[list[list[int]], float]:
    """The tokens of all answers, and the accept length."""
    found = server.generate_many(PROMPTS, max_new_tokens=48)
    steps = sum(each["meta_info"]["spec_verify_ct"] for each in found)
    tokens = [each["output_ids"] for each in found]
    return tokens, sum(map(len, tokens)) / steps


def name_of_model(server: Client) -> str:
    name: str = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
    return name


@pytest.mark.parametrize("way", WAYS)
def test_the_draft_is_worse_and_good_again(server: Client, drafts: Drafts, way: str) -> None:
    """The cache is flushed afterwards: with requests in SGLang's batch, a flush is refused.

    A request stays in it for a moment after its answer.
    """
    server.flush()
    name = name_of_model(server)
    tokens, before = answers(server)
    lengths = []
    for folder in (drafts.bad, drafts.good):
        with ThreadPoolExecutor(1) as pool:
            under_load = pool.submit(answers, server)
            updated = WAYS[way](server, drafts, folder, flush_cache=False)
            assert updated.status_code == 200, updated.text
            assert updated.json()["success"], updated.text
            assert under_load.result()[0] == tokens
        server.flush()
        again, length = answers(server)
        assert again == tokens
        lengths.append(length)
    worse, good = lengths
    assert worse < before / 1.3
    assert good > worse * 1.3
    assert name_of_model(server) == name


@pytest.mark.parametrize("way", WAYS)
def test_the_cache_is_flushed(server: Client, drafts: Drafts, way: str) -> None:
    def cached() -> int:
        found = server.generate(PROMPTS[0], max_new_tokens=4)
        for _ in range(2):  # the scheduler answers it once a step: then the batch is empty
            server_info(server)
        return int(found["meta_info"]["cached_tokens"])

    cached()
    assert cached() > 0
    updated = WAYS[way](server, drafts, drafts.good)
    assert updated.status_code == 200, updated.text
    assert cached() == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_draft_is_refused(
    server: Client, drafts: Drafts, tmp_path: Path, way: str
) -> None:
    server.flush()
    before = answers(server)
    part = changed(drafts.bad, tmp_path, lambda w: {k: v for k, v in w.items() if k != LEFT_OUT})
    refused = WAYS[way](server, drafts, part)
    assert refused.status_code == 400, refused.text
    assert f"missing {LEFT_OUT}" in refused.text
    assert "partly" not in refused.text
    server.flush()
    after = answers(server)
    assert after[0] == before[0]
    assert after[1] > before[1] / 1.2


def test_in_the_middle_of_an_answer(server: Client, drafts: Drafts) -> None:
    """The engine is paused with requests in it. Only a flush of the cache is refused then."""
    server.flush()
    alone = server.generate(PROMPTS[0], max_new_tokens=120, ignore_eos=True)["output_ids"]
    answers = server.stream(PROMPTS[0], max_new_tokens=120, ignore_eos=True)
    next(answers)
    assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    body: dict[str, Any] = {"selector": "draft", "flush_cache": False}
    for folder in (drafts.bad, drafts.good):
        updated = server.post("/update_weights_from_disk", body | {"model_path": str(folder)})
        assert updated.status_code == 200, updated.text
    texts = [serialised(list(named(drafts.bad).items())) for _ in range(drafts.ranks)]
    with session(server):
        flushing = {"serialized_named_tensors": texts, "selector": "draft"}
        refused = server.post("/update_weights_from_tensor", flushing)
    assert refused.status_code == 400
    assert "flush" in refused.text.lower()
    assert server.post("/continue_generation", {}).status_code == 200
    *_, last = answers
    assert last["output_ids"] == alone
    server.flush()
    assert by_folder(server, drafts, drafts.good).status_code == 200


def test_whose_weights_a_folder_holds(server: Client, drafts: Drafts) -> None:
    body = {"model_path": str(drafts.good), "selector": "all"}
    refused = server.post("/update_weights_from_disk", body)
    assert refused.status_code == 400
    assert "selector" in refused.text
