"""`sglang-dflash inspect`: describes a draft and checks it, from its configs and headers alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_dflash.checkpoint import hub, read_draft
from sglang_dflash.checkpoint.config import DFlashConfig, LayerAttention, Rope
from sglang_dflash.checkpoint.fields import Place
from sglang_dflash.checkpoint.files import FETCH_AGAIN, JSON_LIMIT, read_json
from sglang_dflash.checkpoint.fit import Target, defects, misfits, target_of
from sglang_dflash.checkpoint.tensors import Tensors, read_headers
from sglang_dflash.errors import Refusal, Unreachable, in_one_paragraph
from sglang_dflash.settings.block_size import longest_block

FITS, DOES_NOT_FIT, NOT_KNOWN = 0, 2, 3  # exit statuses


@dataclass
class Report:
    """The findings about a draft. A part that could not be read is None."""

    draft: DFlashConfig | None = None
    tensors: Tensors | None = None
    target: Target | None = None
    target_parameters: int = 0
    mask_token: str | None = None
    problems: list[Refusal] = field(default_factory=list)  # of the draft or the target alone
    misfits: list[Refusal] = field(default_factory=list)  # of the draft beside the target
    unreachable: list[Unreachable] = field(default_factory=list)  # names that no hub answered for

    @property
    def status(self) -> int:
        """The exit status. A problem is known even if the hub did not answer for another part."""
        if self.problems or self.misfits:
            return DOES_NOT_FIT
        return NOT_KNOWN if self.unreachable else FITS

    def as_json(self) -> dict[str, Any]:
        """The fields of `--json`. Without a draft they keep their types: sizes are 0, ids -1."""
        draft = self.draft
        ids = draft.target_layer_ids if draft else ()
        return {
            "fits": self.status == FITS,
            "reached": not self.unreachable,
            "family": draft.family.name if draft else "unknown",
            "format": draft.format if draft else "unknown",
            "block_size": longest_block(draft) if draft else 0,
            "draft_width": draft.draft_width if draft else 0,  # `block_size` of the checkpoint
            "target_layer_ids": {"transformers": [i + 1 for i in ids], "sglang": list(ids)},
            "mask_token_id": draft.mask_token_id if draft else -1,
            "kv_bytes_per_token": draft.kv_bytes_per_token() if draft else 0,
            "parameters": self.tensors.parameters if self.tensors else 0,
            "problems": [
                {"what": refusal.what, "fix": refusal.fix} for _, refusal in self.refusals()
            ],
        }

    def refusals(self) -> Iterator[tuple[str, Refusal]]:
        """Each refusal, after a label of its kind."""
        for label, refusals in (
            ("cannot be served", self.problems),
            ("does not fit", self.misfits),
            ("not known", self.unreachable),
        ):
            for refusal in refusals:
                yield label, refusal


def inspect(draft_name: str, target_name: str | None) -> Report:
    """Read and check a draft, alone or beside a target. Both names are folders or hub ids.

    Raises no `Refusal`: each one becomes a part of the report.
    """
    report = Report()
    with _noting(report):
        _report_draft(report, draft_name)
    if target_name is not None:
        with _noting(report):
            _report_target(report, target_name)
    if report.draft is not None and report.target is not None:
        report.misfits += misfits(report.draft, report.target)
    return report


@contextlib.contextmanager
def _noting(report: Report) -> Iterator[None]:
    """Add a `Refusal` that the body raises to the report."""
    try:
        yield
    except Unreachable as refusal:
        report.unreachable.append(refusal)
    except Refusal as refusal:
        report.problems.append(refusal)


def _report_draft(report: Report, name: str) -> None:
    """Set the report's draft and tensors, and add its defects. Raises `Refusal`."""
    folder = hub.config_folder(name)
    try:
        report.draft, report.tensors = read_draft(folder, hub.remote_headers(name, folder))
    except Refusal:
        # Broken weights must not hide other problems: the config may be readable.
        with contextlib.suppress(Refusal):
            report.draft, _ = read_draft(folder, headers=Tensors(folder))
        raise
    report.problems += defects(report.draft, report.tensors, report.draft.draft_width)
    if not report.tensors.known:
        raise Refusal(f"The folder {folder} holds no safetensors file.", FETCH_AGAIN)


def _report_target(report: Report, name: str) -> None:
    """Set the report's target, its parameter count and the mask's text. Raises `Refusal`."""
    folder = hub.config_folder(name)
    report.target = _target(folder)
    if report.draft is not None:
        with contextlib.suppress(Refusal):  # the text of the mask is for people only
            report.mask_token = _text_of(report.draft.mask_token_id, folder / "tokenizer.json")
    with contextlib.suppress(Refusal):  # as is the number of parameters
        headers = hub.remote_headers(name, folder) or read_headers(folder, rename=str)
        report.target_parameters = headers.parameters


def _target(folder: Path) -> Target:
    """The target that config.json describes. A `text_config` is used if there is one."""
    file = folder / "config.json"
    raw = read_json(file.resolve())  # files of a target may be links
    text = raw.get("text_config") or raw
    return target_of(Place(text if isinstance(text, dict) else {}, str(file)), str(folder))


def _text_of(token: int, file: Path) -> str | None:
    """The text of a token in a tokenizer.json, or None. Raises `Refusal`.

    It is looked up in the file, because a tokenizer of a broken file crashes the process.
    """
    raw = read_json(file, JSON_LIMIT)
    added = raw.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("id") == token:
            return str(entry.get("content"))
    vocabulary = Place(raw, str(file)).section("model").raw.get("vocab")
    texts = vocabulary if isinstance(vocabulary, dict) else {}
    return next((text for text, number in texts.items() if number == token), None)


def run(draft: str, target: str | None, as_json: bool) -> int:
    """Print the report. Returns its exit status.

    0: the draft fits. 2: it does not, or it cannot be read. 3: the model hub did not answer.
    """
    report = inspect(draft, target)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        show(report, Console())
    return report.status


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    if report.draft is not None:
        table = Table(show_header=False)
        for name, value in _rows(report, report.draft).items():
            table.add_row(name, escape(str(value)))
        console.print(table)
    for label, refusal in report.refusals():
        what, fix = escape(refusal.what), escape(refusal.fix)
        console.print(f"[bold red]{label}:[/] {what} [bold]{fix}[/]")
    if report.status == FITS:
        console.print("fits" if report.target else "sound (no --target to compare with)")


def _rows(report: Report, draft: DFlashConfig) -> dict[str, Any]:
    """Name and value of each row of the table."""
    rows: dict[str, Any] = {
        "family": draft.family.name,
        "format": draft.format,
        "block size": f"{longest_block(draft)} ({longest_block(draft) - 1} drafts)",
        "layers": f"{draft.num_layers} x {draft.hidden_size}",
        "layer ids, Transformers": [i + 1 for i in draft.target_layer_ids],
        "layer ids, SGLang": list(draft.target_layer_ids),
        "mask": in_one_paragraph(f"{draft.mask_token_id} {report.mask_token or ''}".strip()),
        "vocabulary": _vocabulary(draft),
        "RoPE": _ropes(draft),
        "attention": _attention(draft),
        "KV bytes a token": draft.kv_bytes_per_token(),
    }
    if draft.family.parts():
        rows["heads"] = ", ".join(draft.family.parts())
    if report.tensors is not None:
        rows["parameters"] = f"{report.tensors.parameters:,}"
        if report.target_parameters:
            share = report.tensors.parameters / report.target_parameters
            rows["cost beside the target"] = f"{share:.1%} of its parameters"
    return rows


def _vocabulary(draft: DFlashConfig) -> str:
    if draft.draft_vocab_size is None:
        return f"{draft.vocab_size}, the target's"
    mapped = ", mapped by d2t" if draft.vocabulary_map else ""
    return f"{draft.draft_vocab_size} of {draft.vocab_size}{mapped}"


def _ropes(draft: DFlashConfig) -> str:
    """Each different RoPE of the layers, once."""
    distinct: list[Rope] = []
    for rope in draft.rope:
        if rope not in distinct:
            distinct.append(rope)
    return "; ".join(f"theta {rope.theta:g} {rope.scaling or ''}".strip() for rope in distinct)


def _attention(draft: DFlashConfig) -> str:
    """The attention of each layer, by its number."""
    return "; ".join(f"{i}: {_view(view)}" for i, view in enumerate(draft.attention))


def _view(view: LayerAttention) -> str:
    text = "full" if view.window is None else f"window {view.window}"
    if view.anchored:
        text += " from the anchor"
    if view.causal:
        text += ", causal"
    return text
