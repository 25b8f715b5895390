"""Stage draft: train it on the target's own answers.

The recipe is that of the DFlash paper (random anchors, masked blocks, a loss that decays along the
block), with two changes. Half of the loss weighs each draft by its worth. Half of the steps have
shorter blocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from training.draft_model import Draft
from training.export import write_checkpoint
from training.run import Run, autocast
from training.shapes import DRAFT_CONFIG, IM_START
from training.target import features_of, load_target

LEARNING_RATE = 3e-3
CODE_SHARE = 0.65  # of a step's answers
WHOLE = DRAFT_CONFIG["block_size"]
WHOLE_BLOCKS = 0.5  # of the steps; the others have blocks of these sizes:
SHORTER_BLOCKS = (2, 3, 4, 6, 8, 12)
SHORTEST_ANSWER = 5  # tokens


@dataclass(frozen=True)
class Answer:
    """A prompt, the target's answer behind it, and the target's features of both."""

    ids: Tensor  # [S] int64
    features: Tensor  # [S, K*H] bfloat16
    first: int  # position where the answer begins

    @property
    def is_chat(self) -> bool:
        return bool(self.ids[0] == IM_START)


def train_draft(
    work: Path, steps: int, device: str, compiled: bool, anchors: int = 18, batch: int = 32
) -> None:
    """Read the target and answers.jsonl from `work`, and write work/draft."""
    torch.manual_seed(1)
    target = load_target(work, device)
    draft = Draft(DRAFT_CONFIG).to(device)
    run = Run(draft, LEARNING_RATE, steps, work / "draft.pt")
    mix = Mix(read_answers(work / "answers.jsonl", target), batch)
    fit(draft, run, target, mix.draw, random.Random(2 + run.done), device, compiled, anchors)
    write_draft(draft, work / "draft")


def fit(
    draft: Draft,
    run: Run,
    target: PreTrainedModel,
    draw: Callable[[random.Random], list[Answer]],
    rng: random.Random,
    device: str,
    compiled: bool,
    anchors: int,
) -> None:
    """Run the steps that are left.

    draw: the answers of a step; anchors: blocks of each of them.
    """
    head = target.lm_head.weight.float()
    embed = torch.nn.Embedding.from_pretrained(head)
    loss_of_whole = torch.compile(_loss, dynamic=True) if compiled else _loss
    for bar in run.steps_left("draft"):
        size = WHOLE if rng.random() < WHOLE_BLOCKS else rng.choice(SHORTER_BLOCKS)
        tensors = batched(draw(rng), anchors, rng, device)
        loss_of = loss_of_whole if size == WHOLE else _loss
        loss, accepted = loss_of(draft, head, embed, *tensors, size)
        run.step(loss)
        bar.set_postfix(accept=f"{1 + accepted.item():.2f}", refresh=False)


def write_draft(draft: Draft, folder: Path) -> Path:
    """Write a checkpoint in bfloat16 to a folder, and return that."""
    state = draft.state_dict()
    weights = {name: p.detach().to(torch.bfloat16).cpu() for name, p in state.items()}
    return write_checkpoint(folder, DRAFT_CONFIG, weights)


@torch.no_grad()
def read_answers(path: Path, target: PreTrainedModel, batch: int = 64) -> list[Answer]:
    """The answers of a file, shortest first, with the target's features, computed once."""
    rows = [json.loads(line) for line in path.open()]
    rows = [row for row in rows if len(row["answer"]) >= SHORTEST_ANSWER]
    rows.sort(key=lambda row: len(row["prompt"]) + len(row["answer"]))
    found = []
    for start in tqdm(range(0, len(rows), batch), desc="features", mininterval=10):
        here = rows[start : start + batch]
        tokens = [torch.tensor(row["prompt"] + row["answer"]) for row in here]
        features = features_of(target, pad_sequence(tokens, batch_first=True).to(target.device))
        for ids, feature, row in zip(tokens, features, here, strict=True):
            found.append(Answer(ids, feature[: len(ids)].clone(), len(row["prompt"])))
    return found


class Mix:
    """Answers to draw the rows of a step from."""

    def __init__(self, answers: list[Answer], batch: int) -> None:
        self._chats = [answer for answer in answers if answer.is_chat]
        self._codes = [answer for answer in answers if not answer.is_chat]
        self._of_code = int(CODE_SHARE * batch)
        self._of_chat = batch - self._of_code

    def draw(self, rng: random.Random) -> list[Answer]:
        """Rows of code, then of chats."""
        codes = rng.sample(self._codes, self._of_code)
        return codes + rng.sample(self._chats, self._of_chat)


def batched(
    answers: list[Answer], anchors: int, rng: random.Random, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pad to features [B, S, K*H] float32, ids [B, S], anchors' positions [B, A], lengths [B]."""
    lengths = torch.tensor([len(answer.ids) for answer in answers], device=device)
    ids = pad_sequence([answer.ids for answer in answers], batch_first=True)
    features = pad_sequence([answer.features for answer in answers], batch_first=True)
    at = [
        [rng.randint(answer.first, len(answer.ids) - 2) for _ in range(anchors)]
        for answer in answers
    ]
    return features.to(device).float(), ids.to(device), torch.tensor(at, device=device), lengths


def _loss(
    draft: Draft,
    head: Tensor,
    embed: torch.nn.Embedding,
    features: Tensor,
    ids: Tensor,
    at: Tensor,
    lengths: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Weighted loss in nats, and the mean number of accepted drafts per block.

    head: [V, H] float32; features, ids, at, lengths: as `batched` makes them; size: of a block.
    """
    with autocast(ids.device.type):
        logits = F.linear(draft(features, ids, at, embed, size)[:, :, 1:], head)
    where = at[:, :, None] + torch.arange(1, size, device=ids.device)
    valid = (where < lengths[:, None, None]).float()
    of_block = ids[:, None, :].expand(-1, at.shape[1], -1)
    labels = of_block.gather(2, where.clamp(max=ids.shape[1] - 1))
    loss = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
    loss = loss.view_as(valid)
    hits = (logits.argmax(-1) == labels).float() * valid
    accepted = hits.cumprod(-1).sum(-1).mean()
    return (loss * position_weights(loss.detach(), valid)).sum(), accepted


def position_weights(loss: Tensor, valid: Tensor) -> Tensor:
    """The weight of each draft's loss. loss: [B, A, N-1], -log P(right); valid: as loss, 0 or 1.

    Half of the weight decays along the block, as in the paper. The other half is the worth of the
    draft: the derivative of the expected steps per token, 1 / (1 + sum of P(drafts 1..k right)), by
    -log P. So it is largest for drafts that are reached, in blocks of which little is accepted.
    """
    decaying = torch.exp(-torch.arange(loss.shape[-1], device=loss.device) / 7.0) * valid
    survival = ((-loss).exp() * valid).cumprod(-1)
    behind = survival.flip(-1).cumsum(-1).flip(-1)
    worth = behind / (1 + survival.sum(-1, keepdim=True)) ** 2 * valid
    return 0.5 * (decaying / decaying.sum() + worth / worth.sum())
