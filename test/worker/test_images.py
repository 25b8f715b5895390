"""Targets that see images: their positions have three parts, and the draft sees features only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)

from test.checkpoints import VOCAB, draft_config, draft_weights, prompt, write_draft
from test.inprocess import InProcess
from test.precision import LOGPROB_BOUND
from test.targets import IMAGE_TOKENS, write
from test.worker.conftest import facts, force

SEEDS = (1, 2, 3)
LONG = {"max_new_tokens": 30, "ignore_eos": True, "return_logprob": True}
TOKENS = {name: VOCAB - 9 + i for i, name in enumerate(IMAGE_TOKENS)}  # as `write` numbers them
KINDS = [
    "Qwen3_5ForConditionalGeneration",
    pytest.param("Qwen2_5_VLForConditionalGeneration", marks=pytest.mark.full),
    pytest.param("Qwen3VLForConditionalGeneration", marks=pytest.mark.full),
]
FLAGS: list[Any] = [
    {},
    pytest.param({"disable_radix_cache": True, "chunked_prefill_size": 8}, marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write(folder / "target", request.param)
    config = draft_config()
    write_draft(folder / "draft", config, draft_weights(config))
    return folder


def with_image(pair: Path, seed: int) -> tuple[list[int], MultimodalProcessorOutput]:
    """A prompt with a random image of 8 x 4 patches, as SGLang's tokenizer process hands it on."""
    config = json.loads((pair / "target" / "config.json").read_text())
    vision = config["vision_config"]
    channels = vision["in_channels" if "in_channels" in vision else "in_chans"]
    size = channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    grid, merge = torch.tensor([[1, 8, 4]]), vision["spatial_merge_size"]
    count = int(grid.prod()) // merge**2
    seen = [TOKENS["vision_start_token_id"], *[TOKENS["image_token_id"]] * count]
    before = prompt(seed, 6)
    ids = before + seen + [TOKENS["vision_end_token_id"]] + prompt(seed + 1, 5 + seed)
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=torch.randn(8 * 4, size, generator=torch.Generator().manual_seed(seed)),
        offsets=[(len(before) + 1, len(before) + count)],
        model_specific_data={"image_grid_thw": grid},
    )
    positions, delta = MRotaryEmbedding.get_rope_index(
        merge,
        TOKENS["image_token_id"],
        TOKENS["video_token_id"],
        TOKENS["vision_start_token_id"],
        config["model_type"],
        vision.get("tokens_per_second"),
        torch.tensor([ids]),
        grid,
    )
    assert delta != 0  # else the positions would be those of text
    image = MultimodalProcessorOutput(
        mm_items=[item],
        im_token_id=TOKENS["image_token_id"],
        mrope_positions=positions.squeeze(1),
        mrope_position_delta=delta,
    )
    return ids, image


@pytest.fixture(scope="module")
def answers(pair: Path) -> list[dict[str, Any]]:
    """Without speculation, alone. They depend on the image."""
    found = []
    with InProcess(str(pair / "target"), disable_radix_cache=True) as engine:
        for seed in SEEDS:
            ids, image = with_image(pair, seed)
            req = engine.add(ids, mm_inputs=image, **LONG)
            engine.run(req)
            found.append(facts(req))
        ids, _ = with_image(pair, SEEDS[0])
        _, other = with_image(pair, SEEDS[1])
        assert engine.generate(ids, mm_inputs=other, **LONG) != found[0]["ids"]
    return found


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_target(pair: Path, answers: list[dict[str, Any]], flags: dict[str, Any]) -> None:
    rng, reqs = random.Random(2), []
    with InProcess(str(pair / "target"), str(pair / "draft"), **flags) as engine:
        forced = force(engine, lambda _: rng.randint(0, 7))
        for seed, answer in zip(SEEDS, answers, strict=True):
            ids, image = with_image(pair, seed)
            reqs.append(engine.add(ids, mm_inputs=image, **LONG))
            forced.truth[reqs[-1].rid] = answer["ids"]
            engine.step()
        engine.run(*reqs)
    for req, answer in zip(reqs, answers, strict=True):
        got = facts(req)
        assert got["ids"] == answer["ids"]
        assert got["logprobs"] == pytest.approx(answer["logprobs"], abs=LOGPROB_BOUND)
        assert req.spec_num_correct_drafts > 10


def talk(engine: InProcess, pair: Path, truth: list[list[int]] | None) -> list[list[int]]:
    """Two turns of a session. The image is in the first one."""
    engine.scheduler.open_session(OpenSessionReqInput(capacity_of_str_len=1000, session_id="one"))
    add: Callable[..., Any] = engine.add
    ids, image = with_image(pair, 5)
    rng, before, said = random.Random(3), None, []
    forced = None if truth is None else force(engine, lambda _: rng.randint(0, 7))
    for turn, (text, seen) in enumerate(((ids, image), (prompt(9, 6), None))):
        session = SessionParams(id="one", rid=before)
        req = add(text, mm_inputs=seen, session_params=session, **LONG | {"max_new_tokens": 12})
        if forced is not None and truth is not None:
            forced.truth[req.rid] = truth[turn] + [0] * 8
        engine.run(req)
        assert req.finished_reason.to_json()["type"] == "length", req.finished_reason.to_json()
        before = req.rid
        said.append(list(req.output_ids_through_stop))
    return said


def test_session(pair: Path) -> None:
    """The second turn's prompt has SGLang's numbers of the image, outside of the vocabulary."""
    with InProcess(str(pair / "target")) as engine:
        truth = talk(engine, pair, None)
    with InProcess(str(pair / "target"), str(pair / "draft")) as engine:
        assert talk(engine, pair, truth) == truth
