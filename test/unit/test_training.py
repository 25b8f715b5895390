"""The recipe of the bundled draft: what a block sees, and what a draft's loss counts."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.tiny.draft_model import Draft
from sglang_dflash.tiny.train import DRAFT, VOCAB, _position_weights


@pytest.mark.parametrize("size", [DRAFT["block_size"], 3])
def test_a_block_sees_the_context_before_its_anchor_and_itself(size):
    """Blocks of one forward equal blocks alone, whatever stands at and behind their anchors."""
    torch.manual_seed(0)
    draft, hidden = Draft(DRAFT), DRAFT["hidden_size"]
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


def test_half_of_the_loss_is_what_drafts_are_worth():
    """The rest of the weights is the derivative of the expected steps a token, by autograd."""
    torch.manual_seed(0)
    loss = (3 * torch.rand(2, 3, 15)).requires_grad_()
    valid = (torch.arange(15) < torch.tensor([15, 8, 1])[:, None]).float().expand(2, 3, 15)
    weights = _position_weights(loss.detach(), valid)
    steps = 1 / (1 + ((-loss).exp() * valid).cumprod(-1).sum(-1))
    (worth,) = torch.autograd.grad(steps.sum(), loss)
    decaying = torch.exp(-torch.arange(15) / 7.0) * valid
    expected = (worth / worth.sum() + decaying / decaying.sum()) / 2
    torch.testing.assert_close(weights, expected)
    assert not weights[:, 1, 8:].any()
