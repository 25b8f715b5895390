"""What a step is handed: policies that are chosen once, and observers that see each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from torch import Tensor

from sglang_dflash.method.acceptance import Outcome
from sglang_dflash.method.block import Block
from sglang_dflash.step.copies import HostCopy

if TYPE_CHECKING:  # its imports are those of a forward, which later releases of SGLang lack
    from sglang_dflash.step.verify import VerifyResult


class Choice(Protocol):
    """The part of a block that a step verifies."""

    @property
    def block(self) -> Block: ...

    def learn(self, outcome: Outcome) -> None:
        """outcome: of the step, on the device. The host has waited for it."""


@dataclass(frozen=True)
class Drafted:
    """A drafted block, and the part of it whose verify is planned, if it is."""

    block: Block
    planned: Choice | None = None


class VerifyWidth(Protocol):
    """How many positions of a drafted block the target verifies."""

    def choose(self, block: Block, reqs: list[Req]) -> Choice:
        """Cut the drafted block of these requests. On a GPU the host does not wait for it."""


class NextDraft(Protocol):
    """The block that is drafted after a step or a prefill, or None to draft it later."""

    def after_prefill(self, batch: ScheduleBatch, anchors: Tensor) -> Drafted | None:
        """anchors: [B] int64, the first tokens."""

    def after_verify(
        self, batch: ScheduleBatch, verified: VerifyResult, copy: HostCopy
    ) -> Drafted | None:
        """copy: of `AcceptResult.packed`."""


class Logprobs(Protocol):
    """Reports log probabilities, for batches in which a request wants them."""

    def after_prefill(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, ids: Tensor
    ) -> None:
        """Report those of the first tokens, ids: [B] int64."""

    def after_verify(
        self, batch: ScheduleBatch, logits: Sequence[Tensor], tokens: list[list[int]]
    ) -> None:
        """Report those of each request's committed tokens.

        logits: [w, V] per request, with the logit rules applied; tokens: those that each request
        took, from position 0 on.
        """


class TargetStates(Protocol):
    """What the target keeps of a request besides KV."""

    def commit(self, rows: Tensor, num_committed: list[int], lens: list[int]) -> None:
        """Advance the states by committed tokens, before the next forward of the target.

        rows: [B] int64, the request rows of the last verify, in its order; num_committed: of each
        request in that verify, at least 1; lens: all its committed tokens, these included.
        """


class NoStates:
    """For targets that have only KV."""

    def commit(self, rows: Tensor, num_committed: list[int], lens: list[int]) -> None:
        pass


@dataclass(frozen=True)
class CommittedTokens:
    """The tokens that a step committed to a request, at least one."""

    tokens: list[int]
    num_accepted: int  # drafts among them
    place: int  # index of the first of them in the answer


@dataclass(frozen=True)
class CommittedStep:
    """What a step did, by request."""

    reqs: list[Req]
    drafts: Callable[[], list[list[int]]]  # of whole blocks; the host may wait for their copy
    widths: list[int]  # positions that were verified
    committed: list[CommittedTokens]

    @property
    def accepted(self) -> list[int]:
        """The number of accepted drafts."""
        return [each.num_accepted for each in self.committed]


class ContextObserver(Protocol):
    """Sees the tokens that join the context of requests, in a prefill or behind a verify."""

    def observe(
        self, reqs: Sequence[Req], states: Tensor, positions: Tensor, starts: Tensor, counts: Tensor
    ) -> None:
        """Look at the target's states before another forward is queued.

        states: [n, >= K*H]; positions: [n] int64; starts, counts: [B], the rows of each request,
        of which the first `counts` join.
        """


class StepObserver(Protocol):
    """Sees each step when it is committed, and changes nothing of it."""

    def observe(self, step: CommittedStep) -> None: ...


class WorkerReport(Protocol):
    """What SGLang's reports ask of a worker."""

    def take_mean_width(self) -> float:
        """The mean verify width since this was asked last."""

    def count_steps(self, labels: dict[str, Any]) -> None:
        """Count steps and time their parts for Prometheus. labels: SGLang's, with their values."""

    def description(self) -> dict[str, Any]:
        """The draft and how it is served, for `/server_info`."""
