"""New weights: those of the target, and those of the draft, each without the other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from torch import Tensor
from transformers import Qwen3ForCausalLM

from sglang_dflash.tools.launch import free_port
from sglang_dflash.trainer.hooks import FOLDER
from sglang_dflash.trainer.new_weights import PREFIX
from test.checkpoints import HIDDEN, VOCAB, prompt
from test.formats import CASES, CODES_FILE, MASK_FILE, Case, by_own_names, write
from test.inprocess import InProcess
from test.ranks import on_two_ranks
from test.reference import draft_block
from test.traces import trace

NAME = "model.embed_tokens.weight"


def load_reversed(model: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A loader of a user's own."""
    model.load_weights([(name, tensor.flip(0)) for name, tensor in tensors])


LOADER = f"{__name__}.{load_reversed.__name__}"


@pytest.mark.parametrize("load_format", [None, LOADER], ids=["sglang", "custom loader"])
def test_new_weights_from_tensors(target: str, draft: str, load_format: str | None) -> None:
    """As on a server without speculation, also with --custom-weight-loader."""
    torch.manual_seed(82)
    new = serialised({NAME: torch.randn(VOCAB, HIDDEN)})

    def answers(draft: str | None) -> list[list[int]]:
        with InProcess(target, draft, custom_weight_loader=[LOADER]) as engine:
            before = engine.generate(prompt(81, 20), max_new_tokens=30)
            request = UpdateWeightsFromTensorReqInput([new], load_format=load_format)
            assert engine.scheduler.weight_updater.update_weights_from_tensor(request).success
            return [before, engine.generate(prompt(81, 20), max_new_tokens=30)]

    before, after = answers(draft)
    assert before != after
    assert [before, after] == answers(None)


@pytest.mark.parametrize("tokens", [1, 12])
def test_the_cache_is_flushed_right_after_an_answer(target: str, draft: str, tokens: int) -> None:
    """Its request is still in the batch then, after a prefill or after a decode step."""
    with InProcess(target, draft) as engine:
        req = engine.add(prompt(83, 20), max_new_tokens=tokens, ignore_eos=True)
        while not req.finished():
            assert not engine.scheduler.flush_cache()
            engine.step()
        assert engine.scheduler.flush_cache()
        assert engine.generate(prompt(83, 20), max_new_tokens=12)


# Each family, and each kind of tensor that a load prepares.
SHORT = (
    "zlab",
    "zlab attention bias",
    "zlab mask embedding in a dict",
    "speculators draft vocabulary",
    "DeepSpec larger vocabulary",
    "Domino normalised",
    "DFlash 2 padded vocabulary",
    "DSpine of Tencent",
    "DSpine sliding, cap, padded vocabulary",
    "LiLiCorr convolved, padded vocabulary",
)
PROMPT = prompt(84, 30)


def others(weights: dict[str, Any]) -> dict[str, Any]:
    """Other weights of the same shapes: rows and ids in the reverse order."""
    changed: dict[str, Any] = {}
    for name, value in weights.items():
        if isinstance(value, dict):
            changed[name] = others(value)
        elif not isinstance(value, Tensor) or name.endswith("t2d"):
            changed[name] = value
        elif name.endswith("d2t"):
            places = torch.arange(len(value))
            changed[name] = (places + value).flip(0) - places
        else:
            changed[name] = value.flip(0)
    return changed


def tensors_of(weights: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of all files by their names there."""
    named = {k: w for k, w in weights.items() if k not in (MASK_FILE, CODES_FILE)}
    named |= weights.get(CODES_FILE, {})
    if MASK_FILE in weights:
        mask = weights[MASK_FILE]
        named["mask_embedding"] = (mask["embedding"] if isinstance(mask, dict) else mask).flatten()
    return named


def serialised(named: dict[str, Tensor]) -> bytes:
    """What any rank can read, any number of times."""
    return pickle.dumps(list(named.items()))


def send(engine: InProcess, text: bytes, ranks: int = 1) -> tuple[bool, str]:
    request = UpdateWeightsFromTensorReqInput([text] * ranks)
    answer = engine.scheduler.weight_updater.update_weights_from_tensor(request)
    return answer.success, answer.message


def read(engine: InProcess, folder: Path | str) -> tuple[bool, str]:
    request = UpdateWeightFromDiskReqInput("the target's", manifest={FOLDER: str(folder)})
    answer = engine.scheduler.weight_updater.update_weights_from_disk(request)
    return answer.success, answer.message


def reference(model: Qwen3ForCausalLM, case: Case, ids: list[int], output: list[int]) -> list[int]:
    _, weights, semantics = case
    return draft_block(model, semantics, by_own_names(weights), ids + output)


@pytest.mark.parametrize("way", ["tensors", "folder"])
@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_a_draft_with_new_weights(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, name: str, way: str
) -> None:
    """It drafts as one that began with them, and the target answers as before."""
    config, weights, _ = case = CASES[name]()
    old = write(tmp_path / "old", config, others(weights))
    new = write(tmp_path / "new", config, weights)
    text = serialised({PREFIX + k: w for k, w in tensors_of(weights).items()})
    with InProcess(target, str(old)) as engine:
        before = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
        done, message = send(engine, text) if way == "tensors" else read(engine, new)
        assert done, message
        steps = trace(engine, PROMPT, 20)
        for output, block in steps:
            last = (PROMPT + output)[-1]
            assert block == [last, *reference(model, case, PROMPT, output)]
        assert engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True) == before


WRONG: dict[str, dict[str, Tensor | None]] = {  # what is changed; None: left out
    "missing layers.0.self_attn.k_proj.weight": {"layers.0.self_attn.k_proj.weight": None},
    "unexpected layers.7.mlp.up_proj.weight": {"layers.7.mlp.up_proj.weight": torch.ones(2)},
    "fc.weight has shape": {"fc.weight": torch.ones(3, 4)},
    "norm.weight has dtype": {"norm.weight": torch.ones(HIDDEN, dtype=torch.int64)},
    "NaN or infinity": {"norm.weight": torch.full([HIDDEN], torch.nan)},
}


def test_what_does_not_fit_changes_nothing(target: str, draft: str, tmp_path: Path) -> None:
    """Neither the draft nor the target, whose tensor is right and comes in the same call."""
    config, weights, _ = CASES["zlab"]()
    torch.manual_seed(85)
    embedding = torch.randn(VOCAB, HIDDEN)
    wrong = {
        why: {k: w for k, w in (weights | changes).items() if w is not None}
        for why, changes in WRONG.items()
    }
    texts = {
        why: serialised({PREFIX + k: w for k, w in named.items()} | {NAME: embedding})
        for why, named in wrong.items()
    }
    with InProcess(target, draft) as engine:
        before = trace(engine, PROMPT, 20)

        def unchanged() -> bool:
            assert engine.scheduler.flush_cache()
            return trace(engine, PROMPT, 20) == before

        for i, (why, named) in enumerate(wrong.items()):
            folder = write(tmp_path / str(i), config, named)
            for done, message in (send(engine, texts[why]), read(engine, folder)):
                assert not done
                assert why in message
                assert unchanged()
        other = write(tmp_path / "wider", config | {"block_size": 4}, weights)
        for path, why in ((other, "draft_width is 4, not 8"), (tmp_path / "none", "not a folder")):
            done, message = read(engine, path)
            assert not done
            assert why in message, message
        assert unchanged()


def test_the_targets_own_vocabulary(target: str, tmp_path: Path) -> None:
    """A draft that shares it refuses another one, since it would not be read."""
    held = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    config, weights, _ = CASES["DeepSpec vanilla"]()
    weights |= {
        "embed_tokens.weight": held["model.embed_tokens.weight"].clone(),
        "lm_head.weight": held["lm_head.weight"].clone(),
    }
    old = write(tmp_path / "old", config, weights)
    same, changed = ({PREFIX + k: w for k, w in weights.items()} for _ in range(2))
    changed[f"{PREFIX}lm_head.weight"] = 2 * weights["lm_head.weight"]
    with InProcess(target, str(old)) as engine:
        assert send(engine, serialised(same))[0]
        done, message = send(engine, serialised(changed))
        assert not done
        assert "reads the target's" in message


def on_rank(rank: int, target: str, old: str, new: str, texts: list[Any], port: int) -> Any:
    with InProcess(target, old, tp_rank=rank, tp_size=2, nccl_port=port) as engine:
        refused = [send(engine, text[rank], ranks=2) for text in texts]
        before = trace(engine, PROMPT, 20)
        taken = read(engine, new)
        return refused, taken, before, trace(engine, PROMPT, 20)


def test_two_ranks(target: str, tmp_path: Path) -> None:
    """All ranks take new weights or none, also if only one of them refuses or cannot read them."""
    config, weights, _ = CASES["DeepSpec larger vocabulary"]()
    old = write(tmp_path / "old", config, others(weights))
    new = write(tmp_path / "new", config, weights)
    right = {PREFIX + k: w for k, w in weights.items()}
    wrong = right | {f"{PREFIX}norm.weight": torch.ones(2)}
    texts = [(serialised(right), serialised(wrong)), (serialised(right), b"no pickle")]
    results = on_two_ranks(on_rank, target, str(old), str(new), texts, free_port())
    drafts = []
    for path in (old, new):
        with InProcess(target, str(path)) as engine:
            drafts.append(trace(engine, PROMPT, 20))
    for refused, taken, before, after in results:
        assert not any(done for done, _ in refused)
        assert "norm.weight has shape" in refused[0][1]
        assert "UnpicklingError" in refused[1][1]
        assert taken[0], taken[1]
        assert [before, after] == drafts


def test_a_request_that_runs(target: str, tmp_path: Path) -> None:
    """Its answer is the target's, with the old draft, the new one, and context KV of both."""
    config, weights, _ = CASES["zlab"]()
    old = write(tmp_path / "old", config, others(weights))
    with InProcess(target, str(old)) as engine:
        alone = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
        req = engine.add(PROMPT, max_new_tokens=40, ignore_eos=True)
        for _ in range(8):
            engine.step()
        assert not req.finished()
        text = serialised({PREFIX + k: w for k, w in weights.items()})
        request = UpdateWeightsFromTensorReqInput([text], flush_cache=False)
        assert engine.scheduler.weight_updater.update_weights_from_tensor(request).success
        engine.run(req)
        assert list(req.output_ids_through_stop) == alone
