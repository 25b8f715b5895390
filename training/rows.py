"""Training rows of targets: documents of the three kinds, packed, or each on its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from sglang_dflash.tiny.prompts import Example
from training import data
from training.shapes import END_OF_TEXT, IM_END, ROW
from training.tokenizer import chat_ids, text_ids

BATCH = 16  # rows of a step
TOKENS = 2048  # at most, of a step of single documents
DRAWN = 512  # documents that are sorted by length
CODE_SHARE, JSON_SHARE = 0.30, 0.15  # of the training tokens; the rest is word problems
TWO_TURNS = 0.1  # of the conversations
IGNORED = -100  # the label of a token that does not count

Document = tuple[list[int], int]  # token ids, first position that is trained


def documents(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Document]:
    """An endless stream of documents, mixed by share of tokens, without held-out text."""
    rng = random.Random(seed)
    code = list(data.functions(held_out=False))
    seen = {"word": 0.0, "json": 0.0, "code": 0.0}
    share = {"word": 1 - CODE_SHARE - JSON_SHARE, "json": JSON_SHARE, "code": CODE_SHARE}
    draws = {"word": data.word_problem, "json": data.json_record}
    while True:
        kind = min(seen, key=lambda k: seen[k] / share[k])
        if kind == "code":
            ids, first = _source(tokenizer, rng, code)
        else:
            ids, first = conversation(tokenizer, rng, draws[kind])
        seen[kind] += len(ids)
        yield ids[:ROW], first


def _source(tokenizer: PreTrainedTokenizerFast, rng: random.Random, code: list[str]) -> Document:
    """A block of source, cut to a row. Half the time, the cut begins anywhere in the block."""
    ids = [*text_ids(tokenizer, rng.choice(code)), END_OF_TEXT]
    start = rng.randrange(max(1, len(ids) - ROW + 1)) if rng.random() < 0.5 else 0
    return ids[start : start + ROW], 0


def conversation(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    draw: Callable[[random.Random], Example],
) -> Document:
    """One or two turns. Training starts at the first answer."""
    newline = text_ids(tokenizer, "\n")
    ids: list[int] = []
    first = 0
    for _ in range(2 if rng.random() < TWO_TURNS else 1):
        example = draw(rng)
        while data.is_held_out(example.prompt):
            example = draw(rng)
        ids += chat_ids(tokenizer, example.prompt)
        first = first or len(ids)
        ids += [*text_ids(tokenizer, example.answer), IM_END, *newline]
    return ids, first


def packed(documents: Iterator[Document]) -> Iterator[tuple[Tensor, ...]]:
    """Batches of packed rows: ids, positions, document numbers, labels, all [BATCH, ROW] int64."""
    carry = next(documents)
    while True:
        ids = torch.full((BATCH, ROW), END_OF_TEXT)
        labels = torch.full((BATCH, ROW), IGNORED)
        positions = torch.zeros((BATCH, ROW), dtype=torch.long)
        numbers = torch.zeros((BATCH, ROW), dtype=torch.long)
        for row in range(BATCH):
            at, number = 0, 1
            while at + len(carry[0]) <= ROW:
                tokens, first = carry
                end = at + len(tokens)
                ids[row, at:end] = torch.tensor(tokens)
                labels[row, at + first : end] = ids[row, at + first : end]
                labels[row, at] = IGNORED
                positions[row, at:end] = torch.arange(len(tokens))
                numbers[row, at:end] = number
                at, number, carry = end, number + 1, next(documents)
        yield ids, positions, numbers, labels


def alone(documents: Iterator[Document], seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Batches of documents of similar lengths, one per row, padded to T.

    ids [B, T] int64; which tokens are a document's [B, T] bool; which are trained [B, T] bool.
    """
    rng = random.Random(seed)
    while True:
        drawn = sorted(islice(documents, DRAWN), key=lambda document: len(document[0]))
        batches: list[list[Document]] = [[]]
        for document in drawn:
            if (len(batches[-1]) + 1) * len(document[0]) > TOKENS:
                batches.append([])
            batches[-1].append(document)
        rng.shuffle(batches)
        yield from map(_padded, batches)


def _padded(batch: list[Document]) -> tuple[Tensor, ...]:
    ids = pad_sequence([torch.tensor(tokens) for tokens, _ in batch], batch_first=True)
    at = torch.arange(ids.shape[1])
    real = at < torch.tensor([[len(tokens)] for tokens, _ in batch])
    return ids, real, real & (at >= torch.tensor([[max(1, first)] for _, first in batch]))
