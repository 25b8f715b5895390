"""`python -m training.heads`: train a DSpark head on the frozen draft of the bundled pair.

The Markov head learns from the target's own answers, with the true token before each position. The
confidence head learns whether the head's draft is right. If DIR holds no answers, the target first
writes some.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.tiny import DRAFT, TARGET
from training.answers import write_answers
from training.draft import CODE_SHARE, WHOLE, batched, position_weights, read_answers
from training.draft_model import Draft
from training.families import MARKOV_RANK, assemble
from training.run import Run
from training.shapes import DRAFT_CONFIG
from training.target import load_target

LEARNING_RATE = 4e-3
ANSWERS, STEPS = 6000, 500


class Heads(nn.Module):
    """A vanilla Markov head and a confidence head. Parameter names are those of the checkpoint."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(vocab, MARKOV_RANK),
                "markov_w2": nn.Linear(MARKOV_RANK, vocab, bias=False),
            }
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + MARKOV_RANK, 1)})
        for name, p in self.markov_head.named_parameters():
            nn.init.normal_(p, std=0.5 if name.startswith("markov_w1") else 0.0)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [.., V] and logits of confidences [..].

        hidden: [.., H]; base: [.., V], the LM head's; before: [..] int64, the tokens before.
        """
        row = self.markov_head["markov_w1"](before)
        inputs = torch.cat([hidden, row], dim=-1).detach()
        confidence = self.confidence_head["proj"](inputs).squeeze(-1)
        return base + self.markov_head["markov_w2"](row), confidence


def train_heads(work: Path, steps: int, device: str, anchors: int = 18, batch: int = 24) -> None:
    """Read the target and answers.jsonl from `work`, and write work/dspark."""
    torch.manual_seed(3)
    target = load_target(work, device)
    lm_head = target.lm_head.weight.float()
    embed = nn.Embedding.from_pretrained(lm_head)
    draft = Draft(DRAFT_CONFIG).to(device).requires_grad_(False)
    weights = load_file(DRAFT / "model.safetensors")
    draft.load_state_dict({name: weight.float() for name, weight in weights.items()})
    heads = Heads(*lm_head.shape).to(device)
    run = Run(heads, LEARNING_RATE, steps, work / "dspark.pt", muon=False)
    answers = read_answers(work / "answers.jsonl", target)
    chats = [answer for answer in answers if answer.is_chat]
    codes = [answer for answer in answers if not answer.is_chat]
    of_code = int(CODE_SHARE * batch)
    rng = random.Random(4 + run.done)
    for bar in run.steps_left("heads"):
        drawn = rng.sample(codes, of_code) + rng.sample(chats, batch - of_code)
        features, ids, at, lengths = batched(drawn, anchors, rng, device)
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            hidden = draft(features, ids, at, embed, WHOLE)[:, :, 1:].float()
            base = F.linear(hidden, lm_head).float()
        loss, accepted, plain = _loss(heads, hidden, base, ids, at, lengths)
        run.step(loss)
        told = f"{1 + accepted.item():.2f} / {1 + plain.item():.2f}"
        bar.set_postfix(accept=told, refresh=False)
    _save(work, heads)


def _loss(
    heads: Heads, hidden: Tensor, base: Tensor, ids: Tensor, at: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss in nats, and the mean number of accepted drafts with the head and without.

    hidden: [B, A, N-1, H]; base: [B, A, N-1, V]; ids: [B, S]; at: [B, A]; lengths: [B].
    """
    where = at[:, :, None] + torch.arange(WHOLE, device=ids.device)
    of_block = ids[:, None, :].expand(-1, at.shape[1], -1)
    tokens = of_block.gather(2, where.clamp(max=ids.shape[1] - 1))
    before, labels = tokens[:, :, :-1], tokens[:, :, 1:]
    valid = (where[:, :, 1:] < lengths[:, None, None]).float()
    logits, confidence = heads(hidden, base, before)
    loss = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(valid)
    weights = position_weights(loss.detach(), valid)
    hits = (logits.argmax(-1) == labels).float() * valid
    doubt = F.binary_cross_entropy_with_logits(confidence, hits, reduction="none")
    plain = (base.argmax(-1) == labels).float() * valid
    accepted, without = (of.cumprod(-1).sum(-1).mean() for of in (hits, plain))
    return ((loss + doubt) * weights).sum(), accepted, without


def _save(work: Path, heads: Heads) -> None:
    """Write the heads alone, bfloat16, and the draft with them."""
    weights = {name: p.detach().to(torch.bfloat16).cpu() for name, p in heads.state_dict().items()}
    file = work / "dspark.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    assemble("dspark", work, file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.heads", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="where to resume from")
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / TARGET.name).exists():
        shutil.copytree(TARGET, args.work / TARGET.name)
    write_answers(args.work, args.answers, args.device)
    train_heads(args.work, args.steps, args.device)


if __name__ == "__main__":
    main()
