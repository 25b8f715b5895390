"""Small random targets of every class that runs here, compared with Transformers and themselves.

If the capture of a class is off by one layer, its text is still correct, but fewer drafts are
accepted. So the captured features are compared with Transformers' hidden states, and must differ
from those of the neighbouring layers. docs/checkpoints.md says which classes are compared.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.adaptive.throughput import StepTimes
from sglang_dflash.method.block import Block
from sglang_dflash.settings.options import VERIFY_WIDTH
from test.checkpoints import (
    HIDDEN,
    LAYERS,
    VOCAB,
    draft_config,
    draft_weights,
    prompt,
    speculators_draft,
    write_draft,
)
from test.inprocess import InProcess
from test.precision import HIDDEN_STATE_BOUND
from test.reference import Semantics, draft_block
from test.targets import HYBRIDS, KIMI, MULTIMODAL, TARGETS, write
from test.traces import trace

LAYER_IDS = [0, 2, LAYERS - 1]  # the last one, too
TABLE = Path(__file__).parents[2] / "docs" / "checkpoints.md"

ALWAYS = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",  # plain RoPE
    *HYBRIDS[:2],
)


@pytest.mark.parametrize(
    "architecture",
    [
        a if a in ALWAYS else pytest.param(a, marks=pytest.mark.full)
        for a in (*TARGETS, *MULTIMODAL, KIMI)
    ],
)
def test_target(tmp_path: Path, architecture: str) -> None:
    """Greedy output is as without speculation. Features are hidden_states[k + 1] and no others."""
    model = write(tmp_path / "target", architecture)
    config = draft_config(dflash_config={"target_layer_ids": LAYER_IDS})
    draft = write_draft(tmp_path / "draft", config, draft_weights(config))
    ids = prompt(3, 24)
    captured: list[torch.Tensor] = []
    with InProcess(str(tmp_path / "target"), disable_radix_cache=True) as engine:
        expected = engine.generate(ids, max_new_tokens=24, ignore_eos=True)
    assert len(set(expected)) > 2
    with InProcess(str(tmp_path / "target"), str(draft)) as engine:
        write_kv = engine.worker.context_kv.write

        def watched(features: torch.Tensor, *rest: torch.Tensor) -> None:
            captured.append(features.clone())
            write_kv(features, *rest)

        engine.worker.context_kv.write = watched
        assert engine.generate(ids, max_new_tokens=24, ignore_eos=True) == expected
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    for feature, k in zip(captured[0].split(HIDDEN, dim=1), LAYER_IDS, strict=True):
        torch.testing.assert_close(feature, states[k + 1][0], atol=HIDDEN_STATE_BOUND, rtol=0)
        for neighbour in {k, k + 2} & set(range(LAYERS + 1)):
            assert (feature - states[neighbour][0]).abs().max() > 1e-2


@pytest.mark.parametrize(("publisher", "scale"), [("zlab", HIDDEN**0.5), ("speculators", 1.0)])
def test_a_draft_of_a_target_that_scales_its_embedding(
    tmp_path: Path, publisher: str, scale: float
) -> None:
    """z-lab's drafts read Gemma's scaled embedding. speculators trains on the raw one."""
    model = write(tmp_path / "target", "Gemma3ForCausalLM")
    config = draft_config(dflash_config={"target_layer_ids": LAYER_IDS})
    weights = draft_weights(config)
    semantics = Semantics.of_zlab(config, embedding_scale=scale)
    if publisher == "speculators":
        ids = [k + 1 for k in LAYER_IDS]
        config = speculators_draft(draft_vocab=VOCAB)[0] | {"aux_hidden_state_layer_ids": ids}
    draft = write_draft(tmp_path / "draft", config, weights)
    asked = prompt(3, 24)
    with InProcess(str(tmp_path / "target"), str(draft)) as engine:
        steps = trace(engine, asked, 16)
    for output, block in steps:
        assert block[1:] == draft_block(model, semantics, weights, asked + output)


def test_a_target_with_3d_positions_is_verified_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Width auto picks one width per batch, because SGLang needs equal rows for such a target."""
    monkeypatch.setenv(VERIFY_WIDTH, "auto")
    write(tmp_path / "target", "Qwen2_5_VLForConditionalGeneration")
    config = draft_config(dflash_config={"target_layer_ids": LAYER_IDS})
    draft = write_draft(tmp_path / "draft", config, draft_weights(config))
    asked = [prompt(3 + i, 20 + i) for i in range(3)]
    said = []
    verified: list[list[int]] = []  # the widths of each step's requests
    for path in (None, str(draft)):
        with InProcess(str(tmp_path / "target"), path) as engine:
            if path is not None:
                policy = engine.worker.verify_width
                alike = {(n, n * w): 1.0 + (w > 3) for n in range(1, 4) for w in range(1, 9)}
                policy._step_times = StepTimes(dict.fromkeys(range(1, 4), 0.0), alike)
                choose = policy.choose

                def noted(block: Block, reqs: Any, choose: Any = choose) -> Any:
                    choice = choose(block, reqs)
                    assert choice.block.ragged is None
                    verified.append([choice.block.width] * len(choice.block.slots))
                    return choice

                policy.choose = noted
            reqs = [engine.add(ids, max_new_tokens=24, ignore_eos=True) for ids in asked]
            engine.run(*reqs)
            said.append([list(req.output_ids) for req in reqs])
    assert said[0] == said[1]
    assert any(len(widths) == 3 for widths in verified)
    assert all(len(set(widths)) == 1 for widths in verified)
    assert any(widths[0] == 3 for widths in verified)


def table() -> dict[str, str]:
    """SGLang's target class -> 'compared' or 'read only', from docs/checkpoints.md."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\| (compared|read only)", TABLE.read_text(), re.MULTILINE)
    return {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_table_names_every_target_class() -> None:
    """The table has every class of this SGLang that returns hidden states, and no other class."""
    from sglang.srt.models.registry import ModelRegistry

    drafts = re.compile("NextN|MTP|Eagle|Assistant")  # models of other speculative methods
    hooks = ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")
    able = {
        name
        for name, model in ModelRegistry.models.items()
        if any(hasattr(model, hook) for hook in hooks) and not drafts.search(name)
    }
    assert set(table()) == able


def test_the_table_is_held_to_the_tests() -> None:
    compared = {name for name, state in table().items() if state == "compared"}
    assert compared == {*TARGETS, *MULTIMODAL, KIMI}
