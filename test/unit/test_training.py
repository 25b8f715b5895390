"""The recipe of the pair: the context of a block, the weights of the loss, the exported prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_dflash.tiny.prompts import PROMPTS
from training.draft import position_weights
from training.draft_model import Draft
from training.export import write_prompts
from training.shapes import DRAFT_CONFIG, VOCAB


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
