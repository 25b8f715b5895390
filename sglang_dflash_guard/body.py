"""Requests for text: each field is what SGLang's own annotations say, or the request is refused.

SGLang checks these types for `/generate` alone, and nowhere those of the sampling parameters. Its
scheduler and its tokenizer crash at values of a wrong type, and at lists of a wrong length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, InstanceOf
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import Refusal, shown
from sglang_dflash_guard.annotations import (
    INT32,
    REGEX,
    TAG,
    UNIONS,
    Record,
    Rule,
    as_python,
    checked,
    number,
    whole,
)

MOST_ANSWERS = 4096  # to one prompt: SGLang makes all requests of `n` at once
STRONGEST_BIAS = 1e30  # decides as a larger one does, and stays finite when logits are scaled
PROMPTS = ("text", "input_ids", "input_embeds")  # the first one that is given counts the requests


def _bounded(bias: float) -> float:
    if bias != bias:
        raise ValueError("a bias is no NaN")
    return max(-STRONGEST_BIAS, min(STRONGEST_BIAS, bias))


# SGLang reads text as a number here.
TOKEN: Any = Annotated[int, Field(ge=-(2**63), lt=2**63, description="the number of a token")]
BIAS: Any = Annotated[number(allow_inf_nan=True), AfterValidator(_bounded)]
OVERRIDES: Any = InstanceOf[PositionalEmbeds]  # type: ignore[misc]
# Types that differ from SGLang's annotations: it serves more than some, and others crash it.
SAMPLING: dict[str, Any] = {
    "n": whole(1, MOST_ANSWERS),
    "top_k": INT32,
    "min_new_tokens": INT32,
    "stream_interval": whole(1, 2**31 - 1),
    "stop_regex": REGEX | list[REGEX],
    "structural_tag": TAG,
    "logit_bias": dict[TOKEN, BIAS],
    "stop_token_ids": list[TOKEN | None],  # SGLang leaves null out
}
REQUEST: dict[str, Any] = {
    "token_ids_logprob": list[list[int] | None] | list[int],
    "positional_embed_overrides": list[OVERRIDES | None] | OVERRIDES,
}
# SGLang hands these to each request of a batch as they are, so a list is never right.
SHARED = {"extra_key", "session_params"}
# SGLang divides these among the requests of a batch without asking whether they are lists.
DIVIDED = {"decode_tp_size", "multi_item_delimiter_indices"}
# SGLang fills these itself. A client's value would reach for another client's answer or adapter.
OWN = {"http_worker_ipc", "lora_id"}
# Multimodal processors read these themselves. In a batch, each request takes its entry.
MEDIA = {"image_data", "video_data", "audio_data", "modalities", "mm_hashes"}


class Parts(NamedTuple):
    """The rules of a field that may have one value for all requests or a list with one for each."""

    alone: Rule | Record
    entry: Rule | None  # None: the field has no such list
    has_lists: bool  # the one value is a list itself


class Size(NamedTuple):
    """The number of requests that a body asks for."""

    prompts: int | None  # None: one prompt that is in no list
    answers: int  # to each prompt

    @property
    def batched(self) -> bool:
        """Whether SGLang treats it as a batch."""
        return self.prompts is not None or self.answers > 1


def check_request(manager: Any, obj: Any, *_: Any, **__: Any) -> None:
    """BEFORE `TokenizerManager.generate_request`: refuse a request that cannot be served.

    Values that pydantic converts are written back, so `"max_new_tokens": 64.0` becomes 64.
    """
    if isinstance(obj, EmbeddingReqInput):
        raise Refusal(
            "This model does not appear to be an embedding model.",
            "Ask a server that was started with --is-embedding.",
        )
    for name in OWN:
        if getattr(obj, name) is not None:
            raise Refusal(
                f"{name} is {shown(getattr(obj, name))}.", "Leave it out: the server fills it."
            )
    prompts = _read_prompts(obj)
    size = Size(prompts, _read_sampling(obj, prompts))
    for name, parts in fields().items():
        if getattr(obj, name) is not None:
            _read_field(obj, name, parts, size)
    if isinstance(obj.rid, list) and len(set(obj.rid)) < len(obj.rid):
        raise Refusal(f"rid is {shown(obj.rid)}.", "Give each prompt an id of its own.")
    _check_media(obj, size)
    _check_the_model(manager, obj)


def _read_prompts(obj: Any) -> int | None:
    """The number of prompts; None for one that is in no list."""
    if isinstance(obj.input_ids, Mapping):  # as Transformers' tokenizers return them
        obj.input_ids = obj.input_ids["input_ids"]
    sizes = {}
    for name in PROMPTS:
        value = as_python(getattr(obj, name))
        if value is None:
            continue
        value = prompt_rules()[name].parse(list(value) if isinstance(value, tuple) else value, name)
        if isinstance(value, list) and (not value or [] in value):
            raise Refusal(f"{name} is {shown(value)}.", "No list in it may be empty.")
        setattr(obj, name, value)
        sizes[name] = None if _is_one(name, value) else len(value)
    if not sizes:
        raise Refusal("The request has no prompt.", f"Give one of {', '.join(PROMPTS)}.")
    if len(set(sizes.values())) > 1:
        raise Refusal(f"{' and '.join(sizes)} hold unequally many prompts.", "Give one of them.")
    return next(iter(sizes.values()))


def _is_one(name: str, value: Any) -> bool:
    """Whether the value of this field is one prompt. No list of it is empty."""
    if name == "text":
        return isinstance(value, str)
    first = value[0] if name == "input_ids" else value[0][0]
    return not isinstance(first, list)


def _read_sampling(obj: Any, prompts: int | None) -> int:
    """Read the sampling parameters. Returns the number of answers to each prompt."""
    given, where = obj.sampling_params, "sampling_params"
    if given is None:
        return 1
    if isinstance(given, list) and prompts is not None:
        _check_length(where, given, prompts)
        read = [sampling().parse(one, f"{where}[{i}]") for i, one in enumerate(given)]
        obj.sampling_params, answers = read, {int(one.get("n", 1)) for one in read}
        if len(answers) > 1:
            raise Refusal(
                f"{where} have unequal n.",
                "Give all prompts the same n: SGLang gives each equally many answers.",
            )
        return answers.pop()
    obj.sampling_params = sampling().parse(given, where)
    return int(obj.sampling_params.get("n", 1))


def _read_field(obj: Any, name: str, parts: Parts, size: Size) -> None:
    value = getattr(obj, name)
    if isinstance(value, list) and size.batched and parts.entry and not _is_shared(value, parts):
        _check_length(name, value, size.prompts or 1)
        read: Any = [parts.entry.parse(one, f"{name}[{i}]") for i, one in enumerate(value)]
    elif size.batched and name in DIVIDED:
        raise Refusal(f"{name} is {shown(value)}.", "In a batch it must be a list of such values.")
    else:
        read = parts.alone.parse(value, name)
    setattr(obj, name, read)


def _is_shared(value: list[Any], parts: Parts) -> bool:
    """Whether a list is the one value of a field whose values are lists, as SGLang decides."""
    return parts.has_lists and not any(isinstance(entry, list) for entry in value)


def _check_length(name: str, value: list[Any], prompts: int) -> None:
    if len(value) != prompts:
        raise Refusal(
            f"{name} has {len(value)} entries.", f"It must have one for each prompt, so {prompts}."
        )


def _check_media(obj: Any, size: Size) -> None:
    """Each request of a batch has its entry of these lists."""
    if not size.batched:
        return
    prompts = size.prompts or 1
    needed = {"video_data": prompts, "audio_data": prompts}
    if not obj.image_data:  # else SGLang makes the modalities
        needed["modalities"] = prompts * size.answers
    for name, entries in needed.items():
        value = getattr(obj, name)
        if isinstance(value, list) and len(value) < entries and (value or name != "modalities"):
            raise Refusal(f"{name} has {len(value)} entries.", f"A batch needs {entries} of them.")


def _check_the_model(manager: Any, obj: Any) -> None:
    """Check the fields whose bounds depend on the loaded model or on flags of the server."""
    config, arguments = manager.model_config, manager.server_args
    for count in _each(obj.top_logprobs_num):
        if not 0 <= count <= config.vocab_size:
            raise Refusal(
                f"top_logprobs_num is {count}.",
                f"It must be a whole number from 0 to {config.vocab_size}, the vocabulary.",
            )
    if any(_each(obj.return_logprob)) and any(start < -1 for start in _each(obj.logprob_start_len)):
        raise Refusal(f"logprob_start_len is {obj.logprob_start_len}.", "It must be -1 or more.")
    for params in _each(obj.sampling_params):
        _check_stops(params, config.vocab_size)
    for overrides in _each(obj.positional_embed_overrides):
        _check_width("positional_embed_overrides", overrides.embeds.shape[-1], config.hidden_size)
    for vectors in _each(obj.input_embeds):
        for vector in vectors if isinstance(vectors[0], list) else [vectors]:
            _check_width("input_embeds", len(vector), config.hidden_size)
    known = arguments.tokenizer_metrics_allowed_custom_labels or ()
    for label in obj.custom_labels or () if arguments.enable_metrics else ():
        if label not in known:
            raise Refusal(
                f"custom_labels has {shown(label)}.",
                "Leave it out, or start the server with it in "
                "--tokenizer-metrics-allowed-custom-labels.",
            )


def _check_stops(params: dict[str, Any], vocab_size: int) -> None:
    """With `min_new_tokens`, SGLang's penalties are columns of these tokens."""
    stops = [token for token in params.get("stop_token_ids") or () if token is not None]
    if (params.get("min_new_tokens") or 0) > 0 and any(not 0 <= t < vocab_size for t in stops):
        raise Refusal(
            f"stop_token_ids is {shown(stops)}.",
            f"With min_new_tokens, its tokens must be in the vocabulary of {vocab_size} tokens.",
        )


def _check_width(name: str, width: int, hidden_size: int) -> None:
    if width != hidden_size:
        raise Refusal(
            f"{name} has a vector of {width} numbers.",
            f"Give vectors of {hidden_size} numbers, as the model's.",
        )


def _each(value: Any) -> Iterator[Any]:
    """The values of a field that may have one for each request."""
    return (entry for entry in (value if isinstance(value, list) else [value]) if entry is not None)


@cache
def sampling() -> Record:
    """The rules of the sampling parameters. SGLang takes null for the default of all but `n`."""
    hints = get_type_hints(SamplingParams.__init__)
    del hints["return"]
    rules = {name: SAMPLING.get(name, hint) for name, hint in hints.items()}
    return Record(
        {
            name: Rule.of(checked(rule if name == "n" else rule | None))
            for name, rule in rules.items()
        }
    )


@cache
def prompt_rules() -> dict[str, Rule]:
    """The rules of the fields that hold prompts."""
    hints = get_type_hints(GenerateReqInput, include_extras=True)
    return {name: Rule.of(checked(hints[name])) for name in PROMPTS}


@cache
def fields() -> dict[str, Parts]:
    """The rules of all other fields but those of `MEDIA` and `OWN`."""
    hints = get_type_hints(GenerateReqInput, include_extras=True)
    elsewhere = {*PROMPTS, *MEDIA, *OWN, "sampling_params"}
    return {
        name: _parts(name, REQUEST.get(name, hint))
        for name, hint in hints.items()
        if name not in elsewhere
    }


def _parts(name: str, annotation: Any) -> Parts:
    """The rules of a field, from "X" or from "X, or a list with an X for each request"."""
    if name == "session_params":
        return Parts(_session(), None, False)
    members = get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)
    lists = [member for member in members if _divides(member, members)]
    alone = tuple(member for member in members if member not in lists)
    return Parts(
        alone=Rule.of(checked(Union[alone])),  # noqa: UP007
        entry=Rule.of(checked(get_args(lists[0])[0])) if lists and name not in SHARED else None,
        has_lists=any(get_origin(member) is list for member in alone),
    )


def _divides(member: Any, members: tuple[Any, ...]) -> bool:
    """Whether this member of a union is a list of its other members."""
    if get_origin(member) is not list or not get_args(member):
        return False
    (entry,) = get_args(member)
    parts = get_args(entry) if get_origin(entry) in UNIONS else (entry,)
    return all(part in (*members, type(None)) for part in parts)


def _session() -> Record:
    hints = get_type_hints(SessionParams)
    return Record({name: Rule.of(checked(hint)) for name, hint in hints.items()})
