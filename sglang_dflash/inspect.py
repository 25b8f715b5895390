"""`sglang-dflash inspect`: what a draft is and whether it fits, from configs and headers alone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from sglang_dflash.checkpoint import hub, load
from sglang_dflash.checkpoint.detect import read_json
from sglang_dflash.checkpoint.fit import FETCH_AGAIN, Problem, Target, defects, keeps_state, misfits
from sglang_dflash.checkpoint.tensors import Tensors, read_headers
from sglang_dflash.config import DFlashConfig, LayerAttention, Rope
from sglang_dflash.errors import Refusal


@dataclass
class Report:
    """What was found; `draft` is None where it could not be read."""

    draft: DFlashConfig | None = None
    tensors: Tensors | None = None
    target: Target | None = None
    target_parameters: int = 0
    mask_token: str | None = None
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What could not be read is 0, the mask -1: fields keep their types."""
        draft = self.draft
        ids = draft.target_layer_ids if draft else ()
        return {
            "fits": not self.problems,
            "format": draft.format if draft else "unknown",
            "block_size": draft.block_size if draft else 0,
            "target_layer_ids": {"transformers": [i + 1 for i in ids], "sglang": list(ids)},
            "mask_token_id": draft.mask_token_id if draft else -1,
            "kv_bytes_per_token": draft.kv_bytes_per_token() if draft else 0,
            "parameters": self.tensors.parameters if self.tensors else 0,
            "problems": [vars(problem) for problem in self.problems],
        }


def inspect(draft_name: str, target_name: str | None) -> Report:
    """Read and check; every refusal becomes a problem."""
    report = Report()
    with _noting(report):
        folder = hub.config_folder(draft_name)
        with _noting(report):
            report.draft, report.tensors = load(folder, hub.remote_headers(draft_name, folder))
            report.problems += defects(report.draft, report.tensors, report.draft.block_size)
            if not report.tensors.known:
                report.problems.append(Problem(f"{folder} holds no safetensors file.", FETCH_AGAIN))
        if report.problems and report.draft is None:  # broken weights hide no other problem
            with contextlib.suppress(Refusal):
                report.draft = load(folder, Tensors(folder))[0]
    if target_name is not None:
        with _noting(report):
            _read_target(report, target_name)
    if report.draft is not None and report.target is not None:
        report.problems += misfits(report.draft, report.target)
    return report


@contextlib.contextmanager
def _noting(report: Report) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        report.problems.append(_problem(str(refusal)))


def _problem(refusal: str) -> Problem:
    """A refusal's sentence, cut where it begins to say what to do."""
    what, fix = (*re.split(r"[:;] (?=(?:add|fetch|give|use|serve)\b)", refusal, maxsplit=1), "")[:2]
    if not fix:
        return Problem(what, FETCH_AGAIN)
    return Problem(f"{what}.", fix[0].upper() + fix[1:])


def _read_target(report: Report, name: str) -> None:
    folder = hub.config_folder(name)
    raw = read_json(folder / "config.json")
    text = raw.get("text_config") or raw
    try:
        report.target = Target(
            path=str(folder),
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            keeps_state=keeps_state(text),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"{folder / 'config.json'} is no target's config ({error} is missing); give the "
            "folder of a target as --target."
        ) from None
    headers = hub.remote_headers(name, folder) or read_headers(folder, str)
    report.target_parameters = headers.parameters
    tokenizer = folder / "tokenizer.json"
    if report.draft is not None and tokenizer.is_file():
        report.mask_token = Tokenizer.from_file(str(tokenizer)).id_to_token(
            report.draft.mask_token_id
        )


def _views(attention: tuple[LayerAttention, ...]) -> str:
    def one(view: LayerAttention) -> str:
        window = "full" if view.window is None else f"window {view.window}"
        anchored = " from the anchor" if view.anchored else ""
        return f"{window}{anchored}{', causal' if view.causal else ''}"

    return "; ".join(f"{i}: {one(view)}" for i, view in enumerate(attention))


def _block_size(draft: DFlashConfig) -> str:
    size = f"{draft.block_size} ({draft.verify_width - 1} drafts)"
    return f"up to {size}" if draft.variable_block_size else size


def _ropes(ropes: tuple[Rope, ...]) -> str:
    distinct = [rope for i, rope in enumerate(ropes) if rope not in ropes[:i]]
    return "; ".join(f"theta {rope.theta:g} {rope.scaling or ''}".strip() for rope in distinct)


def show(report: Report, console: Console) -> None:
    """The report for people."""
    draft = report.draft
    if draft is not None:
        table = Table(show_header=False)
        rows: dict[str, Any] = {
            "format": draft.format,
            "block size": _block_size(draft),
            "layers": f"{draft.num_layers} x {draft.hidden_size}",
            "layer ids, Transformers": [i + 1 for i in draft.target_layer_ids],
            "layer ids, SGLang": list(draft.target_layer_ids),
            "mask": f"{draft.mask_token_id} {report.mask_token or ''}".strip(),
            "vocabulary": _vocabulary(draft),
            "RoPE": _ropes(draft.rope),
            "attention": _views(draft.attention),
            "KV bytes a token": draft.kv_bytes_per_token(),
        }
        if report.tensors is not None:
            rows["parameters"] = f"{report.tensors.parameters:,}"
        if report.tensors is not None and report.target_parameters:
            share = report.tensors.parameters / report.target_parameters
            rows["cost beside the target"] = f"{share:.1%} of its parameters"
        for name, value in rows.items():
            table.add_row(name, str(value))
        console.print(table)
    for problem in report.problems:
        console.print(f"[bold red]does not fit:[/] {problem.what} [bold]{problem.fix}[/]")
    if not report.problems:
        console.print("fits" if report.target else "sound (no --target to compare with)")


def _vocabulary(draft: DFlashConfig) -> str:
    if draft.draft_vocab_size is None:
        return f"{draft.vocab_size}, the target's"
    mapped = ", mapped by d2t" if draft.vocabulary_map else ""
    return f"{draft.draft_vocab_size} of {draft.vocab_size}{mapped}"


def run(draft: str, target: str | None, as_json: bool) -> int:
    """0 if the draft fits, 2 if it does not or cannot be read."""
    report = inspect(draft, target)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        show(report, Console())
    return 2 if report.problems else 0
