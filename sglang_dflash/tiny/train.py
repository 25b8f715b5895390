"""`python -m sglang_dflash.tiny.train`: make the bundled target and draft from nothing.

Five stages, each resumable from `--work`: tokenizer, target, answers (what the target itself
generates, greedy), draft (on those answers), export. `evaluate` scores the result. Recipe of the
draft: DFlash paper (random anchors, masked blocks, loss decaying along the block), and half of the
loss by what a draft is worth.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import eager_mask

from sglang_dflash.tiny import data
from sglang_dflash.tiny.draft_model import Draft

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
END_OF_TEXT, IM_START, IM_END, MASK = range(4)
VOCAB = 2048
ROW = 512  # tokens of a packed training row
BATCH = 16  # rows of a step
CODE_SHARE, JSON_SHARE = 0.30, 0.15  # of the training tokens; the rest is word problems
CODE_SHARE_OF_DRAFT = 0.65  # of the draft's rows
WHOLE_BLOCKS = 0.5  # of the draft's steps; the others have blocks of these sizes:
SHORTER_BLOCKS = (2, 3, 4, 6, 8, 12)
THETA = 1_000_000.0
MAX_POSITIONS = 16_384

TARGET: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": THETA,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}
DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": TARGET["num_hidden_layers"],
    "num_hidden_layers": 3,
    "hidden_size": TARGET["hidden_size"],
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "rope_scaling": None,
    "max_position_embeddings": MAX_POSITIONS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "layer_types": ["full_attention"] * 3,
    "use_sliding_window": False,
    "sliding_window": None,
    "dflash_config": {
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3, 5, 7, 8],
        "variable_block_size": True,
    },
}


# ---------------------------------------------------------------------------------------------
# tokenizer


def train_tokenizer(out: Path) -> None:
    """Byte-level BPE, digits single, on the same mixture as the target."""
    rng = random.Random(0)
    texts = [block for block in data.functions(held_out=False) if rng.random() < 0.3]
    for draw, count in ((data.word_problem, 8000), (data.json_record, 3000)):
        for _ in range(count):
            example = draw(rng)
            texts.append(f"{example.prompt}\n{example.answer}")
    tokenizer = Tokenizer(models.BPE())
    words = Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (HERE / "chat_template.jinja").read_text()
    fast.save_pretrained(out)


def chat_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Prompt of one user turn, the assistant's turn opened, as the chat template writes it."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


# ---------------------------------------------------------------------------------------------
# target


def _documents(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[list[int], int]]:
    """Endless (ids, first trained position), kinds mixed by share of tokens, no held-out text."""
    rng = random.Random(seed)
    code = list(data.functions(held_out=False))
    newline = tokenizer.encode("\n", add_special_tokens=False)
    seen = {"word": 0.0, "json": 0.0, "code": 0.0}
    share = {"word": 1 - CODE_SHARE - JSON_SHARE, "json": JSON_SHARE, "code": CODE_SHARE}
    while True:
        kind = min(seen, key=lambda k: seen[k] / share[k])
        if kind == "code":
            ids = [*tokenizer.encode(rng.choice(code), add_special_tokens=False), END_OF_TEXT]
            start = rng.randrange(max(1, len(ids) - ROW + 1)) if rng.random() < 0.5 else 0
            ids, first = ids[start : start + ROW], 0
        else:
            draw = data.word_problem if kind == "word" else data.json_record
            ids, first = [], None
            for _ in range(2 if rng.random() < 0.1 else 1):  # some conversations of two turns
                example = draw(rng)
                while data.is_held_out(example.prompt):
                    example = draw(rng)
                ids += chat_ids(tokenizer, example.prompt)
                first = len(ids) if first is None else first
                ids += [
                    *tokenizer.encode(example.answer, add_special_tokens=False),
                    IM_END,
                    *newline,
                ]
        seen[kind] += len(ids)
        yield ids[:ROW], first or 0


def _packed(documents: Iterator[tuple[list[int], int]]) -> Iterator[tuple[Tensor, ...]]:
    """Batches of packed rows: ids, positions, document numbers, labels, all [BATCH, ROW] int64."""
    carry = next(documents)
    while True:
        ids = torch.full((BATCH, ROW), END_OF_TEXT)
        labels = torch.full((BATCH, ROW), -100)
        positions = torch.zeros((BATCH, ROW), dtype=torch.long)
        numbers = torch.zeros((BATCH, ROW), dtype=torch.long)
        for row in range(BATCH):
            at, number = 0, 1
            while at + len(carry[0]) <= ROW:
                tokens, first = carry
                end = at + len(tokens)
                ids[row, at:end] = torch.tensor(tokens)
                labels[row, at + first : end] = ids[row, at + first : end]
                labels[row, at] = -100
                positions[row, at:end] = torch.arange(len(tokens))
                numbers[row, at:end] = number
                at, number, carry = end, number + 1, next(documents)
        yield ids, positions, numbers, labels


def _optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in named if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 4%, then cosine to 2%."""
    warm = max(1, int(0.04 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


class Run:
    """Optimisation with a checkpoint every `every` steps; `step()` is one update."""

    def __init__(self, model: torch.nn.Module, lr: float, steps: int, path: Path) -> None:
        self.model, self.steps, self.path, self.lr = model, steps, path, lr
        self.optimizers = _optimizers(model, lr)
        self.done = 0
        self.seconds = 0.0
        if path.exists():
            state = torch.load(path, weights_only=False)
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.done, self.seconds = state["done"], state["seconds"]

    def step(self, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * _schedule(self.done, self.steps)
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "done": self.done,
            "seconds": self.seconds,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)


def _progress(run: Run, what: str, every: int = 50) -> Iterator[tqdm]:
    """The steps left of a run, with a progress bar, saving as it goes."""
    with tqdm(total=run.steps, initial=run.done, desc=what, file=sys.stdout, mininterval=10) as bar:
        while run.done < run.steps:
            started = time.monotonic()
            yield bar
            run.seconds += time.monotonic() - started
            bar.update()
            if run.done % every == 0 or run.done == run.steps:
                run.save()


def train_target(work: Path, steps: int, device: str, compiled: bool) -> None:
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "target")
    model = Qwen3ForCausalLM(Qwen3Config(**TARGET)).to(device)
    run = Run(model, 3e-3, steps, work / "target.pt")

    def loss_of(ids: Tensor, positions: Tensor, numbers: Tensor, labels: Tensor) -> Tensor:
        index = torch.arange(ROW, device=ids.device)
        same = numbers[:, :, None] == numbers[:, None, :]
        mask = (same & (index[:, None] >= index))[:, None]
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = model.model(
                ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
            logits = model.lm_head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())

    if compiled:
        loss_of = torch.compile(loss_of)
    batches = _packed(_documents(tokenizer, seed=1 + run.done))
    for bar in _progress(run, "target"):
        loss = loss_of(*(t.to(device) for t in next(batches)))
        run.step(loss)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.to(torch.bfloat16).save_pretrained(work / "target")
    generation = {"bos_token_id": None, "eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": 0}
    (work / "target" / "generation_config.json").write_text(json.dumps(generation, indent=2))


# ---------------------------------------------------------------------------------------------
# answers and draft


def _grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention whose heads of one KV head are rows of one product: a CPU decodes 3 times as fast.

    query: [B, heads, T, D]; key, value: [B, kv heads, S, D]; attention_mask: [B, 1, T, S].
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped.flatten(2, 3) @ key.mT).float().unflatten(2, grouped.shape[2:4]) * scaling
    seen = (scores + attention_mask[:, :, None]).softmax(-1).to(value.dtype)
    return (seen.flatten(2, 3) @ value).view_as(query).transpose(1, 2), None


AttentionInterface.register("grouped", _grouped_attention)
AttentionMaskInterface.register("grouped", eager_mask)


def _load_target(work: Path, device: str) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM.from_pretrained(
        work / "target", dtype=torch.bfloat16, attn_implementation="grouped"
    )
    return model.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def generate(model: Qwen3ForCausalLM, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers, the end token included where it was reached."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), END_OF_TEXT, device=model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)[
        :, width:
    ].tolist()
    answers = []
    for row in out:
        ends = [i for i, token in enumerate(row) if token in (IM_END, END_OF_TEXT)]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


@torch.inference_mode()
def answer_taught(
    model: Qwen3ForCausalLM, prompts: list[list[int]], taught: list[list[int]], rounds: int = 12
) -> list[list[int] | None]:
    """Greedy answers to prompts whose taught answer is known: speculation with that as the draft.

    One forward tells where the target first says something else; that token is put in and the rest
    is tried again. None where `rounds` forwards did not settle it.
    """
    answers = [list(t) for t in taught]
    settled: list[list[int] | None] = [None] * len(prompts)
    open_rows = list(range(len(prompts)))
    for _ in range(rounds):
        if not open_rows:
            break
        rows = [prompts[i] + answers[i] for i in open_rows]
        ids = torch.full((len(rows), max(map(len, rows))), END_OF_TEXT)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        said = model(ids.to(model.device), use_cache=False).logits.argmax(-1).tolist()
        still = []
        for i, row in zip(open_rows, said, strict=True):
            start, answer = len(prompts[i]) - 1, answers[i]
            wrong = next((j for j, token in enumerate(answer) if row[start + j] != token), None)
            if wrong is None:
                settled[i] = answer
                continue
            answer[wrong] = row[start + wrong]
            if answer[wrong] in (IM_END, END_OF_TEXT):
                settled[i] = answer[: wrong + 1]
            else:
                still.append(i)
        open_rows = still
    return settled


def write_answers(work: Path, count: int, device: str, batch: int = 96) -> None:
    """`count` training prompts answered by the target, as JSON lines of token ids."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "target")
    model = _load_target(work, device)
    path = work / "answers.jsonl"
    done = path.read_text().count("\n") if path.exists() else 0
    rng = random.Random(10_000 + done)
    code = list(data.functions(held_out=False))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    with (
        path.open("a") as file,
        tqdm(total=count, initial=done, desc="answers", mininterval=10) as bar,
    ):
        while done < count:
            kind = rng.choices(("word", "json", "code"), (0.35, 0.15, 0.5))[0]
            if kind == "code":  # continue from a random place
                prompts = [encode(rng.choice(code))[: rng.randint(8, 160)] for _ in range(batch)]
                answers: list[list[int] | None] = list(generate(model, prompts, 128))
            else:
                draw = data.word_problem if kind == "word" else data.json_record
                examples = [draw(rng) for _ in range(2 * batch)]
                examples = [e for e in examples if not data.is_held_out(e.prompt)][:batch]
                prompts = [chat_ids(tokenizer, e.prompt) for e in examples]
                taught = [[*encode(e.answer), IM_END] for e in examples]
                answers = answer_taught(model, prompts, taught)
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer is not None:
                    file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            file.flush()
            done += batch
            bar.update(batch)


@torch.no_grad()
def _with_features(
    target: Qwen3ForCausalLM, rows: list[dict[str, list[int]]], batch: int = 64
) -> list[tuple[Tensor, Tensor, int]]:
    """(ids [S], features [S, K*H] bfloat16, first answer position) of each row, made once."""
    layers = [k + 1 for k in DRAFT["dflash_config"]["target_layer_ids"]]
    rows = sorted(rows, key=lambda row: len(row["prompt"]) + len(row["answer"]))
    found = []
    for start in tqdm(range(0, len(rows), batch), desc="features", mininterval=10):
        here = rows[start : start + batch]
        tokens = [torch.tensor(row["prompt"] + row["answer"]) for row in here]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(target.device)
        states = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[k] for k in layers], dim=-1).to(torch.bfloat16)
        found += [
            (ids_row, feature[: len(ids_row)].clone(), len(row["prompt"]))
            for ids_row, feature, row in zip(tokens, features, here, strict=True)
        ]
    return found


def _position_weights(loss: Tensor, valid: Tensor) -> Tensor:
    """What each draft's loss counts. loss: [B, A, N-1], -log P(right); valid: [B, A, N-1] of 0, 1.

    Half of it decays along the block, as in the paper. The other half is what the draft is worth:
    the expected number of steps a token, 1 / (1 + sum of P(drafts 1..k right)), derived by -log P.
    So it lies on the drafts that are reached, and on blocks of which little is accepted.
    """
    decaying = torch.exp(-torch.arange(loss.shape[-1], device=loss.device) / 7.0) * valid
    survival = ((-loss).exp() * valid).cumprod(-1)
    behind = survival.flip(-1).cumsum(-1).flip(-1)
    worth = behind / (1 + survival.sum(-1, keepdim=True)) ** 2 * valid
    return 0.5 * (decaying / decaying.sum() + worth / worth.sum())


def train_draft(
    work: Path, steps: int, device: str, compiled: bool, anchors: int = 18, batch: int = 32
) -> None:
    torch.manual_seed(1)
    target = _load_target(work, device)
    head = target.lm_head.weight.float()
    embed = torch.nn.Embedding.from_pretrained(head)
    draft = Draft(DRAFT).to(device)
    run = Run(draft, 3e-3, steps, work / "draft.pt")
    rows = [json.loads(line) for line in (work / "answers.jsonl").open()]
    examples = _with_features(target, [row for row in rows if len(row["answer"]) > 4])
    chats = [example for example in examples if example[0][0] == IM_START]
    codes = [example for example in examples if example[0][0] != IM_START]
    whole = DRAFT["block_size"]
    order = random.Random(2 + run.done)

    def loss_of(
        features: Tensor, ids: Tensor, at: Tensor, sizes: Tensor, n: int
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = F.linear(draft(features, ids, at, embed, n)[:, :, 1:], head)
        where = at[:, :, None] + torch.arange(1, n, device=device)
        valid = (where < sizes[:, None, None]).float()
        labels = (
            ids[:, None, :].expand(-1, anchors, -1).gather(2, where.clamp(max=ids.shape[1] - 1))
        )
        loss = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
        loss = loss.view_as(valid)
        hits = (logits.argmax(-1) == labels).float() * valid
        accepted = hits.cumprod(-1).sum(-1).mean()
        return (loss * _position_weights(loss.detach(), valid)).sum(), accepted

    of_whole = torch.compile(loss_of, dynamic=True) if compiled else loss_of
    for bar in _progress(run, "draft"):
        n = whole if order.random() < WHOLE_BLOCKS else order.choice(SHORTER_BLOCKS)
        of_code = int(CODE_SHARE_OF_DRAFT * batch)
        here = order.sample(codes, of_code) + order.sample(chats, batch - of_code)
        sizes = torch.tensor([len(ids) for ids, *_ in here], device=device)
        ids = torch.nn.utils.rnn.pad_sequence([i for i, *_ in here], batch_first=True).to(device)
        features = torch.nn.utils.rnn.pad_sequence([f for _, f, _ in here], batch_first=True)
        at = torch.tensor(
            [[order.randint(first, len(i) - 2) for _ in range(anchors)] for i, _, first in here],
            device=device,
        )
        loss, accepted = (of_whole if n == whole else loss_of)(
            features.to(device), ids, at, sizes, n
        )
        run.step(loss)
        bar.set_postfix(accept=f"{1 + accepted.item():.2f}", refresh=False)
    out = work / "draft"
    out.mkdir(exist_ok=True)
    weights = {name: p.detach().to(torch.bfloat16).cpu() for name, p in draft.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(DRAFT, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------
# evaluation


@torch.inference_mode()
def accept_length(
    target: Qwen3ForCausalLM,
    draft: Draft,
    prompts: list[list[int]],
    answers: list[list[int]],
    size: int,
) -> float:
    """(accepted drafts + verify steps) / verify steps of greedy DFlash along known answers.

    size: of the blocks, anchor included.
    """
    layers = [k + 1 for k in DRAFT["dflash_config"]["target_layer_ids"]]
    accepted = steps = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=target.device)
        states = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[k] for k in layers], dim=-1)
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


def evaluate(work: Path, device: str, count: int) -> dict[str, float]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "target")
    target = _load_target(work, device)
    draft = None
    if (work / "draft.pt").exists():
        draft = Draft(DRAFT).to(device)
        draft.load_state_dict(torch.load(work / "draft.pt", weights_only=False)["model"])
        draft = draft.to(torch.bfloat16).eval()
    report: dict[str, float] = {}
    for kind in ("word", "json", "code"):
        examples = data.held_out(kind, count)
        if kind == "code":
            prompts = [tokenizer.encode(e.prompt, add_special_tokens=False) for e in examples]
        else:
            prompts = [chat_ids(tokenizer, e.prompt) for e in examples]
        answers = generate(target, prompts, 128)
        texts = [tokenizer.decode(a, skip_special_tokens=True) for a in answers]
        if kind == "word":
            right = [data.final_answer(t) == e.check for t, e in zip(texts, examples, strict=True)]
            report["word_right"] = sum(right) / len(right)
        if kind == "json":
            right = [t == e.answer for t, e in zip(texts, examples, strict=True)]
            report["json_right"] = sum(right) / len(right)
        if draft is not None:
            of = target, draft, prompts, answers
            report[f"{kind}_accept_length"] = accept_length(*of, DRAFT["block_size"])
            report[f"{kind}_accept_length_of_4"] = accept_length(*of, 4)
    return report


def export(work: Path) -> None:
    """Copy what a server needs into the package."""
    for name, files in {
        "target": (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ),
        "draft": ("config.json", "model.safetensors"),
    }.items():
        (HERE / name).mkdir(exist_ok=True)
        for file in files:
            if (work / name / file).exists():
                shutil.copyfile(work / name / file, HERE / name / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="where to resume from")
    parser.add_argument(
        "--stage",
        choices=["all", "tokenizer", "target", "answers", "draft", "evaluate", "export"],
        default="all",
    )
    parser.add_argument("--target-steps", type=int, default=1250)
    parser.add_argument("--answers", type=int, default=12_000)
    parser.add_argument("--draft-steps", type=int, default=1400)
    parser.add_argument("--evaluate", type=int, default=96, help="held-out prompts of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    compiled = shutil.which("g++") is not None

    def wanted(stage: str) -> bool:
        return args.stage in ("all", stage)

    if wanted("tokenizer") and not (args.work / "target" / "tokenizer.json").exists():
        train_tokenizer(args.work / "target")
    if wanted("target"):
        train_target(args.work, args.target_steps, args.device, compiled)
    if wanted("answers"):
        write_answers(args.work, args.answers, args.device)
    if wanted("draft"):
        train_draft(args.work, args.draft_steps, args.device, compiled)
    if wanted("evaluate"):
        print(json.dumps(evaluate(args.work, args.device, args.evaluate)))
    if wanted("export"):
        export(args.work)


if __name__ == "__main__":
    main()
