"""Stage tokenizer: byte-level BPE with single digits, on the same mixture as the target."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training import data
from training.shapes import MAX_POSITIONS, SPECIAL, VOCAB

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CODE_KEPT = 0.3  # of the blocks of source


def train_tokenizer(out: Path) -> None:
    """Write tokenizer and chat template into the folder `out`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    _with_chat_template(tokenizer).save_pretrained(out)


def _texts() -> list[str]:
    rng = random.Random(0)
    texts = [block for block in data.functions(held_out=False) if rng.random() < CODE_KEPT]
    for draw, count in ((data.word_problem, 8000), (data.json_record, 3000)):
        for _ in range(count):
            example = draw(rng)
            texts.append(f"{example.prompt}\n{example.answer}")
    return texts


def _with_chat_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.read_text()
    return fast


def text_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of raw text."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def chat_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """A prompt of one user turn and the begun assistant turn, by the chat template."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return text_ids(tokenizer, text)
