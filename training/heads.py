"""`python -m training.heads FAMILY`: train what a family adds to the frozen bundled draft.

The parts learn from the target's own answers, with the true tokens before each position. If DIR
holds no answers, the target first writes some. A part's parameters have the checkpoint's names.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dflash.model.candidates import CandidateTransformer
from sglang_dflash.tiny import DRAFT, TARGET
from training.answers import write_answers
from training.causal import make_causal, short_name
from training.draft import WHOLE, Mix, batched, position_weights, read_answers
from training.draft_model import Draft
from training.families import (
    CANDIDATES,
    CODE,
    FAMILIES,
    GROUP,
    GRU_SIZE,
    LOW_RANK,
    MESSAGE,
    RANK,
    TAPS,
    assemble,
)
from training.injection import Spine
from training.run import Run
from training.shapes import DRAFT_CONFIG
from training.target import load_target

LEARNING_RATE = 4e-3
ANSWERS, STEPS = 6000, 500


class Markov(nn.Module):
    """DSpark: a vanilla Markov head and a confidence head."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        vocab, hidden = embed.weight.shape
        w1, w2 = nn.Embedding(vocab, RANK), nn.Linear(RANK, vocab, bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": w1, "markov_w2": w2})
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + RANK, 1)})
        nn.init.normal_(w1.weight, std=0.5)
        nn.init.zeros_(w2.weight)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [.., N-1, V], and logits of confidences [.., N-1] of families that have them.

        hidden: [.., N-1, H]; base: [.., N-1, V], the LM head's; before: [.., N-1] int64, the token
        before each.
        """
        row = self.markov_head["markov_w1"](before)
        inputs = torch.cat([hidden, row], dim=-1).detach()
        confidence = self.confidence_head["proj"](inputs).squeeze(-1)
        return base + self.markov_head["markov_w2"](row), confidence


class Edges(nn.Module):
    """DFlash 2: what a token gains from the token before it."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(0.5 * torch.randn(vocab, RANK))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, RANK))
        self.hidden_projection = nn.Linear(hidden, RANK, bias=False)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[.., V]. hidden: [.., H]; before: [..] int64."""
        weighed = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return F.linear(weighed, self.successor_codebook)


class Selector(nn.Module):
    """DFlash 2: edges between neighbouring tokens. All tokens are candidates in training."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.candidate_selector = Edges(*embed.weight.shape)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `Markov.forward`."""
        return base + self.candidate_selector(hidden, before), None


class PrefixGRU(nn.Module):
    """Domino: a GRU over the tokens before corrects the logits."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        vocab, hidden = embed.weight.shape
        self._embed: Callable[[Tensor], Tensor] = embed.requires_grad_(False).forward
        self.prefix_gru = nn.GRU(hidden, GRU_SIZE, batch_first=True, bias=False)
        last = nn.Linear(RANK, vocab, bias=False)
        first = nn.Linear(hidden + GRU_SIZE, RANK, bias=False)
        self.embed_proj = nn.Sequential(first, nn.SiLU(), last)
        nn.init.zeros_(last.weight)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `Markov.forward`."""
        states, _ = self.prefix_gru(self._embed(before).flatten(0, 1))
        joined = torch.cat([hidden, states.view(*hidden.shape[:-1], -1)], dim=-1)
        return base + self.embed_proj(joined), None


class Chain(nn.Module):
    """JetSpec as a chain: the LM head alone."""

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `Markov.forward`."""
        return base, None


class Candidates(nn.Module):
    """LiLiCorr: a transformer over the likeliest tokens of all positions."""

    context: Tensor  # [.., H] of the token before each anchor; set before each forward

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        hidden, eps = DRAFT_CONFIG["hidden_size"], DRAFT_CONFIG["rms_norm_eps"]
        self.lilicorr = CandidateTransformer(CANDIDATES, hidden, WHOLE, eps)
        self._embed: Callable[[Tensor], Tensor] = embed.requires_grad_(False).forward
        for name, parameter in self.lilicorr.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `Markov.forward`. Behind a token that is no candidate, the LM head's own logits."""
        shape, base = base.shape, base.flatten(0, 1)
        found = base.log_softmax(-1).topk(CANDIDATES.top_k)
        embedded, context = self._embed(found.indices), self.context.flatten(0, 1)
        scores = self.lilicorr(embedded, found.values, hidden.flatten(0, 1), context)
        is_before = found.indices[:, :-1] == before.flatten(0, 1)[:, 1:, None]  # [n, N-2, k]
        known = F.pad(is_before.any(-1), (1, 0), value=True)
        row = F.pad(is_before.int().argmax(-1), (1, 0))
        chosen = scores.gather(2, row[:, :, None, None].expand(-1, -1, 1, scores.shape[3]))
        alone = torch.full_like(base, -torch.inf).scatter(2, found.indices, chosen.squeeze(2))
        return torch.where(known[:, :, None], alone, base).view(shape), None


def spine(embed: nn.Embedding) -> Spine:
    """DSpine: positions hear the one before them."""
    return Spine(embed.weight, CODE, MESSAGE, DRAFT_CONFIG["num_hidden_layers"])


PARTS: dict[str, Callable[[nn.Embedding], nn.Module]] = {
    "dspark": Markov,
    "dflash2": Selector,
    "domino": PrefixGRU,
    "jetspec": lambda _: Chain(),
    "dspine": spine,
    "lilicorr": Candidates,
}
CAUSAL = ("jetspec", "dspine")


def train(
    family: str, work: Path, steps: int, device: str, anchors: int = 18, batch: int = 24
) -> None:
    """Read the target and answers.jsonl from `work`, and write work/FAMILY."""
    torch.manual_seed(3)
    target = load_target(work, device)
    lm_head = target.lm_head.weight.float()
    embed = nn.Embedding.from_pretrained(lm_head)
    draft = Draft(DRAFT_CONFIG)
    weights = load_file(DRAFT / "model.safetensors")
    draft.load_state_dict({name: weight.float() for name, weight in weights.items()})
    draft.requires_grad_(False)
    learns = family in ("dflash2", *CAUSAL)
    if family == "dflash2":
        draft.convolve(TAPS, GROUP)
    if family in CAUSAL:
        make_causal(draft, LOW_RANK)
    part = PARTS[family](embed)
    heard: tuple[Any, ...] = ()
    if isinstance(part, Spine):
        part.norm, heard = draft.norm.forward, (part.after_layer,)
    model = nn.ModuleDict({"draft": draft, "part": part}).to(device)
    run = Run(model, LEARNING_RATE, steps, work / f"{family}.pt", muon=False)
    mix = Mix(read_answers(work / "answers.jsonl", target), batch)
    rng = random.Random(4 + run.done)
    for bar in run.steps_left(family):
        features, ids, at, lengths = batched(mix.draw(rng), anchors, rng, device)
        with torch.set_grad_enabled(learns), torch.autocast(device, dtype=torch.bfloat16):
            hidden = draft(features, ids, at, embed, WHOLE, *heard)[:, :, 1:].float()
            base = F.linear(hidden, lm_head).float()
            if isinstance(part, Candidates):
                context = draft.hidden_norm(draft.fc(features)).float()
                place = (at - 1)[:, :, None].expand(-1, -1, context.shape[2])
                part.context = context.gather(1, place)
        loss, accepted, plain = _loss(model["part"], hidden, base, ids, at, lengths)
        run.step(loss)
        told = f"{1 + accepted.item():.2f} / {1 + plain.item():.2f}"
        bar.set_postfix(accept=told, refresh=False)
    _save(family, model, work)


def _loss(
    part: nn.Module, hidden: Tensor, base: Tensor, ids: Tensor, at: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss in nats, and the mean number of accepted drafts with the part and without.

    hidden: [B, A, N-1, H]; base: [B, A, N-1, V]; ids: [B, S]; at: [B, A]; lengths: [B].
    """
    where = at[:, :, None] + torch.arange(WHOLE, device=ids.device)
    of_block = ids[:, None, :].expand(-1, at.shape[1], -1)
    tokens = of_block.gather(2, where.clamp(max=ids.shape[1] - 1))
    before, labels = tokens[:, :, :-1], tokens[:, :, 1:]
    valid = (where[:, :, 1:] < lengths[:, None, None]).float()

    def surprise(logits: Tensor) -> Tensor:
        flat = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        return flat.view_as(valid)

    logits, confidence = part(hidden, base, before)
    losses = surprise(logits)
    weights = position_weights(losses.detach(), valid)
    losses = losses.masked_fill(losses.isinf(), 0.0)  # the right token is no candidate
    hits, plain = ((of.argmax(-1) == labels).float() * valid for of in (logits, base))
    if base.requires_grad:  # candidates are chosen by the LM head's own logits
        losses = losses + 0.5 * surprise(base)
    if confidence is not None:
        doubt = F.binary_cross_entropy_with_logits(confidence, hits, reduction="none")
        losses = losses + doubt
    accepted, without = (of.cumprod(-1).sum(-1).mean() for of in (hits, plain))
    return (losses * weights).sum(), accepted, without


def _save(family: str, model: nn.ModuleDict, work: Path) -> None:
    """Write the trained parts alone, bfloat16, and the draft with them."""
    learnt = {name: p for name, p in model["draft"].named_parameters() if p.requires_grad}
    own = {short_name(name): p for name, p in learnt.items()} | model["part"].state_dict()
    weights = {
        name: p.detach().to(torch.bfloat16 if p.is_floating_point() else p.dtype).cpu()
        for name, p in own.items()
    }
    file = work / f"{family}.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    assemble(family, work, file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.heads", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="where to resume from")
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / TARGET.name).exists():
        shutil.copytree(TARGET, args.work / TARGET.name)
    write_answers(args.work, args.answers, args.device)
    train(args.family, args.work, args.steps, args.device)


if __name__ == "__main__":
    main()
