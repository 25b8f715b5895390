"""New weights for the draft while the server runs: every rank takes all of them, or none does.

They are copied into the memory of the old ones, so CUDA graphs stay. Context KV of tokens that a
request has already keeps the old projections. It makes drafts worse and no answer other; flush the
cache to be rid of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn
from torch import distributed as dist

from sglang_dflash.checkpoint.new_weights import RESTART, check_new, read_new
from sglang_dflash.errors import WRONG_WEIGHTS, Refusal
from sglang_dflash.model.context_kv import ContextKV
from sglang_dflash.model.draft import DFlashDraftModel
from sglang_dflash.seam.patched import temporarily

logger = logging.getLogger(__name__)

DONE = "The draft has the new weights, the target keeps its own."
PREFIX = "draft."  # of the draft's tensors among the target's, as `/weights_checker` has it
SEND_AGAIN = "Send them again."

Named = Iterable[tuple[str, Tensor]]
Answer = tuple[bool, str]  # as SGLang passes it on: whether it is done, and what to say


class NewWeights:
    def __init__(self, draft: DFlashDraftModel, context_kv: ContextKV) -> None:
        self._draft = draft
        self._context_kv = context_kv
        self._group = get_tp_group().cpu_group

    def from_folder(self, path: str) -> Answer:
        """Take those of a checkpoint, a folder or the id of a hub, which all ranks read."""
        try:
            self._take(lambda: read_new(path, self._draft.dflash))
        except Refusal as refusal:
            return False, str(refusal)
        except WRONG_WEIGHTS as error:  # out of memory, in the middle
            return False, f"{type(error).__name__}: {error}. The draft may be partly changed."
        return True, DONE

    def out_of(self, model: nn.Module, alone: bool, update: Callable[[], Answer]) -> Answer:
        """The answer of an update of SGLang's, which loads weights into a model.

        The draft's are taken out of them before the model gets the others. If any rank refuses
        them, the model gets none. So all ranks call this. alone: all are the draft's. Else those
        whose names begin with `PREFIX` are.
        """
        load: Any = model.load_weights
        arrived = False
        refused: str | None = None

        def divide(weights: Named) -> Any:
            nonlocal arrived, refused
            named = list(weights)
            of_draft = [alone or name.startswith(PREFIX) for name, _ in named]
            own = [(n.removeprefix(PREFIX), t) for n, t in compress(named, of_draft)]
            others = [entry for entry, ours in zip(named, of_draft, strict=True) if not ours]
            arrived = True
            if refused is None:
                try:
                    self._take(lambda: check_new(own, self._draft.dflash) if own or alone else {})
                except Refusal as refusal:
                    refused = str(refusal)
            return None if alone or refused is not None else load(others)

        with temporarily(model, load_weights=divide):
            try:
                answer = update()
            except WRONG_WEIGHTS as error:
                if not arrived:  # the other ranks wait
                    with contextlib.suppress(Refusal):
                        self._hear_of((f"A rank has {type(error).__name__}: {error}.", SEND_AGAIN))
                raise
        if not arrived:
            try:
                self._hear_of(None if answer[0] else (answer[1], SEND_AGAIN))
            except Refusal as refusal:
                refused = str(refusal)
        return answer if refused is None else (False, refused)

    def _take(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take the weights that `read` returns, none or all. Raises the `Refusal` of any rank."""
        weights: Mapping[str, Tensor] = {}
        why = None
        try:
            weights = read()
            if weights:
                self._check_place(weights)
        except Refusal as refusal:
            why = refusal.what, refusal.fix
        except WRONG_WEIGHTS as error:
            why = f"The new weights cannot be read ({type(error).__name__}: {error}).", SEND_AGAIN
        self._hear_of(why)
        if weights:
            if next(self._draft.parameters()).is_cuda:
                torch.cuda.synchronize()  # a forward on another stream may read the old ones
            self._draft.reload(weights)
            self._context_kv.read_weights()
            logger.info("The draft has new weights.")

    def _check_place(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `Refusal` if the served draft cannot take weights as a checkpoint has them."""
        methods = [getattr(each, "quant_method", None) for each in self._draft.layers.modules()]
        plain = all(isinstance(method, UnquantizedLinearMethod | None) for method in methods)
        packed = (getattr(each, "use_intel_amx_backend", False) for each in self._draft.modules())
        if not plain or any(packed):
            raise Refusal("The weights of the served draft are quantised or packed.", RESTART)
        shared = self._draft.unshared(weights)
        if shared is not None:
            raise Refusal(
                f"The served draft had the target's {shared} when it started, so it reads the "
                "target's. The new weights have another one.",
                "If it is a new target's, send that first. Else start the server again.",
            )

    def _hear_of(self, why: tuple[str, str] | None) -> None:
        """Raise the first `Refusal` of any rank. Every rank calls this once in an update.

        why: what this rank refuses, and the fix.
        """
        said: list[tuple[str, str] | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(said, why, group=self._group)
        for each in said:
            if each is not None:
                raise Refusal(*each)
