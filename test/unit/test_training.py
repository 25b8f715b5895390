"""The recipes: the context of a block, the weights of the loss, exported prompts, the hybrid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import PROMPTS
from sglang_dflash.tools.inspect import inspect
from training import families
from training.draft import position_weights
from training.draft_model import Draft
from training.export import write_prompts
from training.families import FAMILIES
from training.hybrid import assemble, convert, write_target
from training.mixers import delta_rule
from training.shapes import DRAFT_CONFIG, HYBRID_CONFIG, VOCAB


@pytest.mark.parametrize("size", [DRAFT_CONFIG["block_size"], 3])
def test_a_block_sees_the_context_before_its_anchor_and_itself(size: int) -> None:
    """Blocks of one forward equal single blocks, whatever follows their anchors."""
    torch.manual_seed(0)
    draft, hidden = Draft(DRAFT_CONFIG), DRAFT_CONFIG["hidden_size"]
    embed = torch.nn.Embedding(VOCAB, hidden)
    features = torch.randn(2, 40, draft.fc.in_features)
    ids, anchors = torch.randint(4, VOCAB, (2, 40)), torch.tensor([[5, 20, 33], [1, 2, 39]])
    with torch.no_grad():
        together = draft(features, ids, anchors, embed, size)
        assert together.shape == (2, 3, size, hidden)
        for row, at in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            end = int(anchors[row, at])
            seen = torch.cat([features[row, :end], torch.randn(7, features.shape[2])])[None]
            known = torch.cat([ids[row, : end + 1], torch.randint(4, VOCAB, (6,))])[None]
            alone = draft(seen, known, anchors[None, row, at : at + 1], embed, size)
            torch.testing.assert_close(together[row, at], alone[0, 0], atol=1e-5, rtol=0)
            before = features[row : row + 1].clone()
            before[:, end - 1] += 1
            here = anchors[row : row + 1, at : at + 1]
            other = draft(before, ids[row : row + 1], here, embed, size)
            assert (other[0, 0] - together[row, at]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_parts_make_a_whole_draft(tmp_path: Path, family: str) -> None:
    """No tensor is missing or left over, and the draft fits the bundled target."""
    report = inspect(str(families.assemble(family, tmp_path)), str(TARGET))
    assert report.problems == []


def test_half_of_the_loss_is_what_drafts_are_worth() -> None:
    """That half is the derivative of the expected steps per token. Autograd gives the same."""
    torch.manual_seed(0)
    loss = (3 * torch.rand(2, 3, 15)).requires_grad_()
    valid = (torch.arange(15) < torch.tensor([15, 8, 1])[:, None]).float().expand(2, 3, 15)
    weights = position_weights(loss.detach(), valid)
    steps = 1 / (1 + ((-loss).exp() * valid).cumprod(-1).sum(-1))
    (worth,) = torch.autograd.grad(steps.sum(), loss)
    decaying = torch.exp(-torch.arange(15) / 7.0) * valid
    expected = (worth / worth.sum() + decaying / decaying.sum()) / 2
    torch.testing.assert_close(weights, expected)
    assert not weights[:, 1, 8:].any()


def test_the_recipe_writes_the_prompts_that_are_shipped(tmp_path: Path) -> None:
    """Code is left out, because it is the standard library of the running Python."""

    def generated(file: Path) -> list[str]:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if not line.startswith('{"kind": "code"')]

    written = tmp_path / "prompts.jsonl"
    write_prompts(written)
    assert len(generated(written)) == 512
    assert generated(written) == generated(PROMPTS)


def test_the_hybrid_without_gdn_layers_is_the_bundled_target(tmp_path: Path) -> None:
    """The same logits and hidden states. This holds for norms, attention and MLPs."""
    config = HYBRID_CONFIG | {"full_attention_interval": 1}
    write_target(tmp_path, convert(load_file(TARGET / "model.safetensors"), config), config)
    ids = torch.randint(4, VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))
    outs = []
    for folder in (TARGET, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            outs.append(model(ids, output_hidden_states=True, use_cache=False))
    bundled, converted = outs
    torch.testing.assert_close(converted.logits, bundled.logits, atol=1e-4, rtol=0)
    assert len(bundled.hidden_states) == 1 + HYBRID_CONFIG["num_hidden_layers"]
    for state, wanted in zip(converted.hidden_states, bundled.hidden_states, strict=True):
        torch.testing.assert_close(state, wanted, atol=1e-4, rtol=0)


def test_transformers_loads_the_hybrid_without_a_tensor_too_few_or_too_many(tmp_path: Path) -> None:
    target, draft = assemble(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values())
    assert model.config.layer_types == ["linear_attention", "full_attention"] * 5
    assert sorted(file.name for file in draft.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("length", [1, 32, 77])
def test_the_delta_rule_of_training_is_that_of_transformers(length: int) -> None:
    """Outputs and gradients."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, length, 4, 64).unbind()
    g, beta = -torch.rand(2, length, 4), torch.rand(2, length, 4)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value, g, beta)]
    found, _ = delta_rule(*inputs)
    wanted, _ = torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    weights = torch.randn_like(wanted)
    of_found, of_wanted = (
        torch.autograd.grad((out * weights).sum(), inputs) for out in (found, wanted)
    )
    for gradient, known in zip(of_found, of_wanted, strict=True):
        torch.testing.assert_close(gradient, known, atol=1e-4, rtol=0)
