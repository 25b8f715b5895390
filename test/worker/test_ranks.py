"""Two ranks on gloo: features are whole on each of them, and tokens are those of one rank.

A model that defers a layer's all-reduce to the next layer's norm has only a partial sum where
SGLang captures its features. The text is right all the same, but drafts are poor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.layers import communicator, flashinfer_comm_fusion
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.engine.v0_5_13 import server_args as rules
from sglang_dflash.tools.launch import free_port
from test.checkpoints import draft_config, draft_weights, prompt, write_draft
from test.inprocess import InProcess
from test.precision import HIDDEN_STATE_BOUND
from test.ranks import on_two_ranks
from test.targets import write

IDS = prompt(3, 24)
LAYER_IDS = [0, 1, 2]  # behind the last layer there is a norm, which makes it whole


class Said(NamedTuple):
    tokens: list[int]
    features: list[list[list[float]]]  # of each forward: [tokens, layers * HIDDEN]


def serve(rank: int, target: str, draft: str, port: int | None, **flags: Any) -> Said:
    """What one of two ranks says and captures; port: None for one rank alone."""
    if port is not None:
        flags |= {"tp_size": 2, "tp_rank": rank, "nccl_port": port}
    captured: list[list[list[float]]] = []
    with InProcess(target, draft, **flags) as engine:
        write_kv = engine.worker.context_kv.write

        def watched(features: torch.Tensor, *rest: torch.Tensor) -> None:
            captured.append(features.tolist())
            write_kv(features, *rest)

        engine.worker.context_kv.write = watched
        return Said(engine.generate(IDS, max_new_tokens=24, ignore_eos=True), captured)


def fuse() -> None:
    """Let SGLang fuse all-reduces where its flag says so, with FlashInfer's kernel in torch."""

    def reduced_and_normed(
        input_tensor: Any, residual: Any, weight: Any, eps: float, **_: Any
    ) -> Any:
        from sglang.srt.distributed import tensor_model_parallel_all_reduce

        residual = residual + tensor_model_parallel_all_reduce(input_tensor)
        return torch.rms_norm(residual, residual.shape[-1:], weight, eps), residual

    communicator._is_sm90_supported = communicator._is_flashinfer_available = True
    communicator.is_flashinfer_allreduce_unavailable = lambda: False
    flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm = reduced_and_normed
    ModelRunner._pre_initialize_flashinfer_allreduce_workspace = lambda _: None


def keep_the_flag() -> None:
    """A mutation: the flag stays on."""
    handle = rules.handle_dflash

    def kept(server_args: Any) -> None:
        handle(server_args)
        server_args.enable_flashinfer_allreduce_fusion = True

    rules.handle_dflash = kept


def serve_all(rank: int, asked: list[tuple[str, str, int]]) -> list[Said]:
    """A rank serves these pairs (target, draft, port), first as they are and then mutated."""
    fuse()
    fused: dict[str, Any] = {"enable_flashinfer_allreduce_fusion": True}
    said = [serve(rank, *pair, **fused) for pair in asked[: len(asked) // 2]]
    keep_the_flag()
    return said + [serve(rank, *pair, **fused) for pair in asked[len(asked) // 2 :]]


# SGLang's class -> whether it captures what a layer leaves, before it is summed over the ranks
CLASSES = {
    "DeepseekV3ForCausalLM": True,
    "Glm4MoeForCausalLM": True,
    "Glm4MoeLiteForCausalLM": True,
    "Qwen3MoeForCausalLM": False,
}
SOME = ["DeepseekV3ForCausalLM"]


def apart(one: Said, other: Said) -> float:
    """The largest difference of the features of the prompt."""
    return float((torch.tensor(one.features[0]) - torch.tensor(other.features[0])).abs().max())


@pytest.mark.parametrize(
    "classes",
    [
        pytest.param(SOME, marks=pytest.mark.ci, id="some"),
        pytest.param(list(CLASSES), marks=pytest.mark.full, id="all"),
    ],
)
def test_features_of_two_ranks(tmp_path: Path, classes: list[str]) -> None:
    """Tokens, and the features of every forward, are those of one rank. SGLang's flag is refused.

    If it were not, the features of some classes would be wrong, and their tokens still right.
    """
    config = draft_config(dflash_config={"target_layer_ids": LAYER_IDS})
    draft = str(write_draft(tmp_path / "draft", config, draft_weights(config)))
    targets = [str(tmp_path / name) for name in classes]
    for name in classes:
        write(tmp_path / name, name)
    alone = [serve(0, target, draft, None) for target in targets]
    asked = [(target, draft, free_port()) for target in targets * 2]
    ranks = on_two_ranks(serve_all, asked)
    for i, name in enumerate(classes):
        for said in ranks:
            assert said[i].tokens == alone[i].tokens
            assert len(said[i].features) == len(alone[i].features)
            for one, other in zip(said[i].features, alone[i].features, strict=True):
                torch.testing.assert_close(
                    torch.tensor(one), torch.tensor(other), atol=HIDDEN_STATE_BOUND, rtol=0
                )
            mutated = said[len(classes) + i]
            assert mutated.tokens == alone[i].tokens
            assert (apart(mutated, alone[i]) > 0.1) == CLASSES[name]
