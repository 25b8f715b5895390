"""Stage evaluate: right answers and accept length on held-out prompts, greedy, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sglang_dflash.tiny.prompts import Example
from training import data
from training.answers import NEW_TOKENS, generate
from training.draft_model import Draft
from training.shapes import DRAFT_CONFIG
from training.target import features_of, load_target
from training.tokenizer import chat_ids, text_ids


def evaluate(work: Path, device: str, count: int) -> dict[str, float]:
    """Shares of right answers, and accept lengths of whole blocks and of blocks of 4."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "target")
    target = load_target(work, device)
    draft = _load_draft(work, device) if (work / "draft").exists() else None
    report: dict[str, float] = {}
    for kind in ("word", "json", "code"):
        examples = data.draw_held_out(kind, count)
        encode = text_ids if kind == "code" else chat_ids
        prompts = [encode(tokenizer, example.prompt) for example in examples]
        answers = generate(target, prompts, NEW_TOKENS)
        if kind != "code":
            texts = [tokenizer.decode(a, skip_special_tokens=True) for a in answers]
            right = [_is_right(e, text) for e, text in zip(examples, texts, strict=True)]
            report[f"{kind}_right"] = sum(right) / len(right)
        if draft is not None:
            of = target, draft, prompts, answers
            report[f"{kind}_accept_length"] = accept_length(*of, DRAFT_CONFIG["block_size"])
            report[f"{kind}_accept_length_of_4"] = accept_length(*of, 4)
    return report


def _load_draft(work: Path, device: str) -> Draft:
    draft = Draft(DRAFT_CONFIG).to(torch.bfloat16)
    draft.load_state_dict(load_file(work / "draft" / "model.safetensors"))
    return draft.to(device).eval()


def _is_right(example: Example, text: str) -> bool:
    if example.kind == "word":
        return bool(data.final_answer(text) == example.check)
    return text == example.answer


@torch.inference_mode()
def accept_length(
    target: PreTrainedModel,
    draft: Draft,
    prompts: list[list[int]],
    answers: list[list[int]],
    size: int,
) -> float:
    """(accepted drafts + verify steps) / verify steps of greedy DFlash along known answers.

    size: of the blocks, anchor included.
    """
    accepted = steps = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=target.device)
        features = features_of(target, ids)
        anchor, end = len(prompt), ids.shape[1]
        while anchor < end - 1:
            at = torch.tensor([[anchor]], device=ids.device)
            hidden = draft(features, ids, at, target.model.embed_tokens, size)[0, 0, 1:]
            drafts = target.lm_head(hidden).argmax(-1)[: end - 1 - anchor]
            agree = (drafts == ids[0, anchor + 1 : anchor + 1 + len(drafts)]).long().cumprod(0)
            accepted += int(agree.sum())
            steps += 1
            anchor += int(agree.sum()) + 1
    return (accepted + steps) / max(1, steps)
