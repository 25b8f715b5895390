"""Steps of a watched answer as a client gets them, with the text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_dflash.report.step_log import Step

BEFORE = 8  # tokens of the answer in front of a text, because the text of a token depends on them
PART = "\ufffd"  # the text of a token that is a part of a character


@dataclass
class ShownSteps:
    """The last steps of one answer. A step is decoded once."""

    by_number: dict[int, dict[str, Any]] = field(default_factory=dict)
    _end: int = 0  # tokens of the answer up to the end of the last step

    def add(self, steps: Sequence[Step], total: int, answer: list[int], tokenizer: Any) -> None:
        """Add the new ones of these steps, and forget those before them.

        steps: the last ones of `total`; answer: token ids, up to the end of these steps at least;
        tokenizer: None for no texts.
        """
        first = total - len(steps)
        for number in [number for number in self.by_number if number < first]:
            del self.by_number[number]
        for number, step in enumerate(steps, start=first):
            if number not in self.by_number:
                texts = {} if tokenizer is None else self._texts(step, answer, tokenizer)
                self.by_number[number] = {"number": number, **asdict(step), **texts}
                self._end = step.place + step.num_committed

    def _texts(self, step: Step, answer: list[int], tokenizer: Any) -> dict[str, Any]:
        end = step.place + step.num_committed
        before = answer[max(0, step.place - BEFORE) : step.place]
        gap_begin = max(0, self._end - BEFORE)
        gap = texts_of(tokenizer, answer[gap_begin : self._end], answer[self._end : step.place])
        return {
            "text_before": "".join(gap),
            "draft_texts": texts_of(tokenizer, before, step.drafts),
            "texts": texts_of(tokenizer, before, answer[step.place : end]),
        }


def texts_of(tokenizer: Any, before: list[int], tokens: list[int]) -> list[str]:
    """The text that each token adds after those before it.

    A character of several tokens is the text of its last one.
    """
    prefixes = [before + tokens[:count] for count in range(len(tokens) + 1)]
    texts, shown = [], ""
    for i, decoded in enumerate(tokenizer.batch_decode(prefixes)):
        whole = decoded.rstrip(PART)
        if i > 0:
            texts.append(whole[len(shown) :])
        shown = whole
    return texts
