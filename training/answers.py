"""Stage answers: the target's own greedy answers to the prompts that train the draft."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sglang_dflash.tiny.prompts import Example
from training import data
from training.shapes import END_OF_TEXT, IM_END
from training.target import load_target
from training.tokenizer import chat_ids, text_ids

NEW_TOKENS = 128
ENDS = (IM_END, END_OF_TEXT)

Ids = list[int]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: list[Ids], new_tokens: int) -> list[Ids]:
    """Greedy answers, with the end token if it was reached."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), END_OF_TEXT, device=model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    answers = []
    for row in out[:, width:].tolist():
        ends = [i for i, token in enumerate(row) if token in ENDS]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


@torch.inference_mode()
def answer_taught(
    model: PreTrainedModel, prompts: list[Ids], taught: list[Ids], rounds: int = 12
) -> list[Ids | None]:
    """Greedy answers to prompts with a taught answer, by speculation with that answer as the draft.

    One forward finds the first place where the target's token is another one. This token is put in,
    and the rest is tried again. An answer is None if `rounds` forwards do not complete it.
    """
    answers = [list(t) for t in taught]
    settled: list[Ids | None] = [None] * len(prompts)
    open_rows = list(range(len(prompts)))
    for _ in range(rounds):
        if not open_rows:
            break
        said = _most_likely(model, [prompts[i] + answers[i] for i in open_rows])
        still = []
        for i, row in zip(open_rows, said, strict=True):
            start, answer = len(prompts[i]) - 1, answers[i]
            wrong = next((j for j, token in enumerate(answer) if row[start + j] != token), None)
            if wrong is None:
                settled[i] = answer
                continue
            answer[wrong] = row[start + wrong]
            if answer[wrong] in ENDS:
                settled[i] = answer[: wrong + 1]
            else:
                still.append(i)
        open_rows = still
    return settled


def _most_likely(model: PreTrainedModel, rows: list[Ids]) -> list[Ids]:
    """The most likely next token after each token of the rows. The result is padded."""
    ids = torch.full((len(rows), max(map(len, rows))), END_OF_TEXT)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    logits: torch.Tensor = model(ids.to(model.device), use_cache=False).logits
    most_likely: list[Ids] = logits.argmax(-1).tolist()
    return most_likely


class _Asker:
    """Draws a batch of prompts from `rng` and has the target answer them."""

    def __init__(self, work: Path, device: str, rng: random.Random, batch: int) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "target")
        self._model = load_target(work, device)
        self._rng, self._batch = rng, batch
        self._source = list(data.functions(held_out=False))

    def code(self) -> tuple[list[Ids], list[Ids | None]]:
        """Beginnings of source, 8 to 160 tokens, and the target's continuations."""
        prompts = []
        for _ in range(self._batch):
            ids = text_ids(self._tokenizer, self._rng.choice(self._source))
            prompts.append(ids[: self._rng.randint(8, 160)])
        return prompts, list(generate(self._model, prompts, NEW_TOKENS))

    def chats(self, draw: Callable[[random.Random], Example]) -> tuple[list[Ids], list[Ids | None]]:
        """Prompts of one turn, none held out, and the target's answers."""
        drawn = [draw(self._rng) for _ in range(2 * self._batch)]
        examples = [e for e in drawn if not data.is_held_out(e.prompt)][: self._batch]
        prompts = [chat_ids(self._tokenizer, e.prompt) for e in examples]
        taught = [[*text_ids(self._tokenizer, e.answer), IM_END] for e in examples]
        return prompts, answer_taught(self._model, prompts, taught)


def write_answers(work: Path, count: int, device: str, batch: int = 96) -> None:
    """At least `count` training prompts answered by the target, as JSON lines of token ids."""
    path = work / "answers.jsonl"
    done = path.read_text().count("\n") if path.exists() else 0
    rng = random.Random(10_000 + done)
    asker = _Asker(work, device, rng, batch)
    draws = {"word": data.word_problem, "json": data.json_record}
    with (
        path.open("a") as file,
        tqdm(total=count, initial=done, desc="answers", mininterval=10) as bar,
    ):
        while done < count:
            kind = rng.choices(("word", "json", "code"), (0.35, 0.15, 0.5))[0]
            prompts, answers = asker.code() if kind == "code" else asker.chats(draws[kind])
            pairs = zip(prompts, answers, strict=True)
            found = [
                {"prompt": prompt, "answer": answer}
                for prompt, answer in pairs
                if answer is not None
            ]
            file.writelines(json.dumps(one) + "\n" for one in found)
            file.flush()
            done += len(found)
            bar.update(len(found))
