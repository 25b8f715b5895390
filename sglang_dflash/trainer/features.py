"""Features for training: what the target computes of a request's tokens, in a file per request.

A server has them only with `--speculative-dflash-features`, and of requests that ask for them. Such
a request shares no prefix of the radix cache, so each of its tokens is computed, and joins the
context of the draft in a prefill, a chunk of one, or a verify. The first rank of each
replica takes the states there. The last token of an answer is in no file unless it was an accepted
draft: the target never reads it.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from torch import Tensor, nn

from sglang_dflash.errors import Refusal
from sglang_dflash.model.target_parts import language_model
from sglang_dflash.settings.options import Features

logger = logging.getLogger(__name__)

ASK = "features"  # a key of `custom_params`
FILE_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)  # of a request's id
WAITING = 16  # requests whose files are not written yet, at most
NOT_WRITTEN = "The features of request %s are not written: %s"
PATIENCE = 30  # seconds for the oldest of them
_asked = itertools.count()  # all ranks of a replica see the same requests in the same order


class Taken:
    """The states of one request that are taken so far."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Tensor]] = []  # the position of the first token; [n, C]
        self.write: Callable[[Req], None] | None = None  # None: on another rank

    def joined(self, tokens: int) -> Tensor | None:
        """[T, C] of all tokens, or all but the last. None: others are missing."""
        ends = [0, *(start + len(part) for start, part in self.parts)]
        count = min(tokens, ends[-1])  # the last part is the newest, if a retraction cut others off
        if count < max(1, tokens - 1):
            return None
        states = self.parts[0][1].new_empty(max(ends), self.parts[0][1].shape[1])
        known = torch.zeros(len(states), dtype=torch.bool)
        for start, part in self.parts:
            states[start : start + len(part)] = part
            known[start : start + len(part)] = True
        return states[:count] if bool(known[:count].all()) else None


def ask(req: Req, features: Features | None) -> str | None:
    """Prepare a new request that asks for features. Returns why it cannot have them, or None."""
    params = req.sampling_params.custom_params
    if not isinstance(params, dict) or not params.get(ASK):
        return None
    if req.sampling_params.max_new_tokens == 0:  # SGLang asks so before `n` answers to a prompt
        return None
    if features is None:
        return "This server writes no features. Start it with --speculative-dflash-features."
    if not FILE_NAME.fullmatch(req.rid):
        return (
            "Features are in a file of the name rid: up to 200 letters, digits, '-', '_' and '.'."
        )
    embedded = (req.input_embeds, getattr(req, "positional_embed_overrides", None))
    if req.session is not None or any(each is not None for each in embedded):
        return "Features are written of token ids alone, without sessions and embeddings."
    req.dflash_features = Taken()
    # No other request has this key in the cache, not even one with the same id.
    req.extra_key = f"{req.extra_key or ''} {req.rid} {next(_asked)}"
    return None


class FeatureFiles:
    """Takes the states of requests that asked, and writes their files in a thread of its own."""

    def __init__(self, features: Features, num_features: int, model: nn.Module) -> None:
        """num_features: K; model: the target. Raises `Refusal`."""
        self._folder = features.folder
        self._num_features = num_features
        self._form, self._suffix = FORMS[features.form]
        self._model = model
        self._size = len(gain_of_final_norm(model))
        self._thread = ThreadPoolExecutor(1)
        self._room = BoundedSemaphore(WAITING)

    def observe(
        self, reqs: Sequence[Req], states: Tensor, positions: Tensor, starts: Tensor, counts: Tensor
    ) -> None:
        """See `step.policies.ContextObserver`. For requests that asked, the host waits here."""
        asked = [i for i, req in enumerate(reqs) if hasattr(req, "dflash_features")]
        if not asked:
            return
        size = self._size
        first, number = starts.tolist(), counts.tolist()
        for i in asked:
            rows = states[first[i] : first[i] + number[i]]
            part = rows[:, : self._num_features * size].cpu(), rows[:, -size:].cpu()
            taken: Taken = reqs[i].dflash_features
            taken.parts.append((int(positions[first[i]]), torch.cat(part, dim=1)))
            taken.write = self._write_later

    def _write_later(self, req: Req) -> None:
        """Queue the file of a request that is finished."""
        ids = [*req.origin_input_ids, *req.output_ids_through_stop]
        try:
            if req.multimodal_inputs is not None:
                raise Refusal("It has images,", "whose places have no token ids.")
            gain = gain_of_final_norm(self._model).cpu()  # now: the target may get new weights
            if not self._room.acquire(timeout=PATIENCE):
                raise Refusal("The folder takes no files.", "Other requests wait for it.")
        except Refusal as why:
            logger.error(NOT_WRITTEN, req.rid, why)
            return
        prompt = len(req.origin_input_ids)
        self._thread.submit(self._write, req.rid, req.dflash_features, ids, prompt, gain)

    def _write(self, rid: str, taken: Taken, ids: list[int], prompt: int, gain: Tensor) -> None:
        file = self._folder / f"{rid}{self._suffix}"
        unfinished = file.with_name(f".{file.name}.part")
        try:
            states = taken.joined(len(ids))
            if states is None:
                raise Refusal("States are missing.", "Please report it.")
            tokens, mask = torch.tensor(ids[: len(states)]), torch.arange(len(states)) >= prompt
            self._form(unfinished, tokens, mask, states.view(len(states), -1, self._size), gain)
            unfinished.replace(file)
        except Exception as why:  # noqa: BLE001, a full disk has many
            logger.error(NOT_WRITTEN, rid, why)
            unfinished.unlink(missing_ok=True)
        finally:
            self._room.release()


def finish(req: Req, *_: Any, **__: Any) -> None:
    """BEFORE `release_kv_cache`: write the file of a request that ended, but not by an abort."""
    taken: Taken | None = getattr(req, "dflash_features", None)
    if taken is None or not req.finished():
        return
    if taken.write is not None and not isinstance(req.finished_reason, FINISH_ABORT):
        taken.write(req)
    del req.dflash_features


def gain_of_final_norm(model: nn.Module) -> Tensor:
    """[H] float32, by which the target's final norm multiplies. Raises `Refusal`."""
    norm = language_model(model).model.norm
    weight = next(norm.parameters())
    ones = torch.full((1, len(weight)), 64.0, dtype=weight.dtype, device=weight.device)
    gain: Tensor = norm(ones)[0].detach().float()
    if not bool(gain.any()):  # a norm that subtracts the mean
        raise Refusal(
            f"The final norm of this target, {type(norm).__name__}, is no RMSNorm.",
            "Leave --speculative-dflash-features out.",
        )
    return gain


def write_speculators(
    file: Path, tokens: Tensor, mask: Tensor, features: Tensor, gain: Tensor
) -> None:
    """A sample of speculators (`train/data.py`), and the loss mask beside it.

    Speculators looks for sample i in a file hs_i, so such is the `rid` to ask with. features: [T,
    K + 1, H], the last after the final norm. Speculators norms this one itself, so it gets it
    without the norm's factors, and of the size 1.
    """
    last = torch.where(gain == 0, 0.0, features[:, -1].float() / gain)
    states = torch.cat([features[:, :-1], last.to(features.dtype)[:, None]], dim=1)
    save_file({"token_ids": tokens, "hidden_states": states, "loss_mask": mask}, file)


def write_specforge(
    file: Path, tokens: Tensor, mask: Tensor, features: Tensor, gain: Tensor
) -> None:
    """A sample of SpecForge's offline training (`algorithms/common/dflash_family_data.py`).

    features: as above. SpecForge takes the last one as the LM head reads it. It ends at a sample
    without two tokens to learn in a row. Raises `Refusal`.
    """
    if mask.sum() < 2:
        raise Refusal("The answer is too short.", "SpecForge needs two tokens of it.")
    parts: Mapping[str, Tensor] = {
        "input_ids": tokens,
        "loss_mask": mask.long(),
        "hidden_states": features[:, :-1].flatten(1).clone(),
        "target_last_hidden_states": features[:, -1].clone(),
    }
    torch.save(dict(parts), file)


Write = Callable[[Path, Tensor, Tensor, Tensor, Tensor], None]
FORMS: dict[str, tuple[Write, str]] = {  # by the name that the flag gives
    "speculators": (write_speculators, ".safetensors"),
    "specforge": (write_specforge, ".ckpt"),
}
