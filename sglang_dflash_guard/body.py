"""Requests for text: each field has the type that SGLang means, or the request is refused.

SGLang checks types for `/generate` alone, and nowhere those of the sampling parameters. Its
scheduler and its tokenizer crash at values of a wrong type, and at lists of a wrong length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, InstanceOf, PlainValidator
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    SessionParams,
    validate_optional_list_i64_1d_2d,
)
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import Refusal, shown
from sglang_dflash.seam import release
from sglang_dflash.seam.flags import is_dflash
from sglang_dflash_guard.values import (
    LIST,
    NUMBER,
    UNSET,
    Biases,
    Fields,
    Flag,
    HiddenStates,
    Int32,
    Labels,
    Number,
    Object,
    Params,
    Pattern,
    Positive,
    Tag,
    Text,
    Texts,
    Token,
    Whole,
    Wholes,
    as_python,
)

MOST_ANSWERS = 4096  # to one prompt: SGLang makes all requests of `n` at once


class Prompts(Fields):
    """One prompt, or a list of them. The first of these that is given counts the requests."""

    text: Annotated[
        Text | list[Text], LIST, Field(description="text or a list whose entries are each text")
    ] = UNSET
    input_ids: Annotated[
        Any,
        PlainValidator(validate_optional_list_i64_1d_2d),
        Field(description="a list of tokens or a list whose entries are each a list of tokens"),
    ] = UNSET
    input_embeds: Annotated[
        list[list[list[Number]]] | list[list[Number]],
        LIST,
        Field(description="a list of vectors or a list whose entries are each a list of vectors"),
    ] = UNSET


class Sampling(Fields):
    """The sampling parameters of a request. null stands for a default."""

    max_new_tokens: Whole = UNSET
    stop: Annotated[
        Text | Texts, Field(description="text or a list whose entries are each text")
    ] = UNSET
    stop_token_ids: Annotated[
        list[Token | None],  # SGLang leaves null out
        LIST,
        Field(description="a list whose entries are each a whole number of 64 bits"),
    ] = UNSET
    stop_regex: Annotated[
        Pattern | list[Pattern],
        Field(
            description="a regular expression or a list whose entries are each a regular expression"
        ),
    ] = UNSET
    temperature: Number = UNSET
    top_p: Number = UNSET
    top_k: Int32 = UNSET
    min_p: Number = UNSET
    frequency_penalty: Number = UNSET
    presence_penalty: Number = UNSET
    repetition_penalty: Number = UNSET
    min_new_tokens: Int32 = UNSET
    n: Annotated[
        int,
        Field(ge=1, le=MOST_ANSWERS, description=f"a whole number from 1 to {MOST_ANSWERS}"),
        NUMBER,
    ] = UNSET
    json_schema: Text = UNSET
    regex: Text = UNSET
    ebnf: Text = UNSET
    structural_tag: Tag = UNSET
    ignore_eos: Flag = UNSET
    skip_special_tokens: Flag = UNSET
    spaces_between_special_tokens: Flag = UNSET
    no_stop_trim: Flag = UNSET
    custom_params: Params = UNSET
    stream_interval: Positive = UNSET
    logit_bias: Biases = UNSET
    sampling_seed: Whole = UNSET
    # Of SGLang 0.5.23.
    beam_width: Positive = UNSET
    watermark: Object = UNSET
    ebnf_full_assistant: Flag = UNSET


class Session(Fields):
    """The place of a request in a session."""

    id: Text = UNSET
    rid: Text = UNSET
    offset: Whole = UNSET
    replace: Flag = UNSET
    drop_previous_output: Flag = UNSET


class Request(Fields):
    """What one request says beside its prompt, its media and its sampling parameters."""

    rid: Text = UNSET
    return_logprob: Flag = UNSET
    logprob_start_len: Whole = UNSET
    top_logprobs_num: Whole = UNSET
    token_ids_logprob: Wholes = UNSET
    return_text_in_logprobs: Flag = UNSET
    return_hidden_states: HiddenStates = UNSET
    return_routed_experts: Flag = UNSET
    return_indexer_topk: Flag = UNSET
    return_entropy: Flag = UNSET
    return_prompt_token_ids: Flag = UNSET
    return_bytes: Flag = UNSET
    routed_experts_start_len: Whole = UNSET
    stream: Flag = UNSET
    background: Flag = UNSET
    log_metrics: Flag = UNSET
    no_logs: Flag = UNSET
    priority: Whole = UNSET
    lora_path: Text = UNSET
    custom_logit_processor: Text = UNSET
    require_reasoning: Flag = UNSET
    extra_key: Text = UNSET
    routing_key: Text = UNSET
    conversation_id: Text = UNSET
    custom_labels: Labels = UNSET
    external_trace_header: Object = UNSET
    received_time: Number = UNSET
    positional_embed_overrides: Annotated[
        InstanceOf[PositionalEmbeds],
        Field(description="PositionalEmbeds"),
    ] = UNSET
    multi_item_delimiter_indices: Wholes = UNSET
    # Media.
    use_audio_in_video: Flag = UNSET
    need_wait_for_mm_inputs: Flag = UNSET
    num_items_assigned: Annotated[
        dict[Modality, list[Whole]], Field(description="an object of lists")
    ] = UNSET
    mm_data_mooncake: Annotated[list[Any], Field(description="a list")] = UNSET
    encoder_urls: Texts = UNSET
    max_dynamic_patch: Whole = UNSET
    min_dynamic_patch: Whole = UNSET
    image_max_dynamic_patch: Whole = UNSET
    video_max_dynamic_patch: Whole = UNSET
    # Servers that share the work.
    bootstrap_host: Text = UNSET
    bootstrap_port: Whole = UNSET
    bootstrap_room: Whole = UNSET
    bootstrap_pair_key: Text = UNSET
    decode_tp_size: Whole = UNSET
    routed_dp_rank: Whole = UNSET
    disagg_prefill_dp_rank: Whole = UNSET
    data_parallel_rank: Whole = UNSET
    # Of SGLang 0.5.23.
    session_id: Text = UNSET
    cache_salt: Text = UNSET
    return_sampling_mask: Flag = UNSET
    sampling_logprobs_mode: Annotated[
        Literal["selected", "support"], Field(description="selected or support")
    ] = UNSET
    return_flat_raw_top_logprobs: Flag = UNSET
    return_flat_raw_output_top_logprobs: Flag = UNSET
    return_flat_raw_top_logprobs_b64: Flag = UNSET
    max_thinking_tokens: Whole = UNSET
    token_indices_to_pool: Wholes = UNSET
    video_config: Object = UNSET
    images_config: Object = UNSET
    mm_processor_kwargs: Object = UNSET


# Fields that may be a list with an entry for each prompt, and those whose entries may be null.
NULLABLE = {
    *("lora_path", "custom_logit_processor", "token_ids_logprob", "positional_embed_overrides"),
    *("bootstrap_port", "decode_tp_size", "sampling_logprobs_mode"),
}
FOR_EACH_PROMPT = NULLABLE | {
    *("rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_hidden_states"),
    *("multi_item_delimiter_indices", "bootstrap_host", "bootstrap_room", "bootstrap_pair_key"),
    *("cache_salt", "return_sampling_mask", "token_indices_to_pool"),
}
# One value is a list itself.
LISTS = {"token_ids_logprob", "multi_item_delimiter_indices", "token_indices_to_pool"}
# SGLang divides these among the requests of a batch without asking whether they are lists.
DIVIDED = {"multi_item_delimiter_indices", "token_indices_to_pool"}
if release.has_own_scheduler_step():
    DIVIDED.add("decode_tp_size")  # since 0.5.19, one value is for all
else:
    FOR_EACH_PROMPT.add("extra_key")
# SGLang fills these itself. A client's value would reach for another client's answer or adapter.
OWN = {"http_worker_ipc", "lora_id"}


OF_THE_PROMPT = "return_hidden_states", "token_ids_logprob"  # a decode server lacks its part


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
    if not manager.is_generation:
        return  # a server of embeddings, which this guard does not know
    if isinstance(obj, EmbeddingReqInput):
        raise Refusal(
            "This model does not appear to be an embedding model.",
            "Ask a server that was started with --is-embedding.",
        )
    for name in OWN:
        if getattr(obj, name, None) is not None:
            raise Refusal(
                f"{name} is {shown(getattr(obj, name))}.", "Leave it out: the server fills it."
            )
    prompts = _read_prompts(obj)
    size = Size(prompts, _read_sampling(obj, prompts))
    _read_fields(obj, size)
    if isinstance(obj.rid, list) and len(set(obj.rid)) < len(obj.rid):
        raise Refusal(f"rid is {shown(obj.rid)}.", "Give each prompt an id of its own.")
    _check_media(obj, size)
    _check_the_model(manager, obj)
    if manager.server_args.disaggregation_mode != "null":
        _check_one_of_two_servers(obj, size)


def refuse_empty(manager: Any, obj: Any, tokens: Any) -> None:
    """BEFORE `TokenizerManager._validate_one_request`: a prompt has tokens, or a session has them.

    tokens: those of one prompt; None if it has vectors.
    """
    session = getattr(obj, "session_params", None) or {}
    if manager.is_generation and not (tokens or obj.input_embeds or session.get("id")):
        raise Refusal("The prompt has no tokens.", "Give text of one token at least.")


def _read_prompts(obj: Any) -> int | None:
    """The number of prompts; None for one that is in no list."""
    if isinstance(obj.input_ids, Mapping):  # as Transformers' tokenizers return them
        obj.input_ids = obj.input_ids["input_ids"]
    sizes = {}
    for name in Prompts.model_fields:
        value = as_python(getattr(obj, name))
        if value is None:
            continue
        value = Prompts.read({name: list(value) if isinstance(value, tuple) else value})[name]
        if isinstance(value, list) and (not value or [] in value):
            raise Refusal(f"{name} is {shown(value)}.", "No list in it may be empty.")
        setattr(obj, name, value)
        sizes[name] = None if _is_one(name, value) else len(value)
    if not sizes:
        raise Refusal(
            "The request has no prompt.", f"Give one of {', '.join(Prompts.model_fields)}."
        )
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
        read = [_sampling(one, f"{where}[{i}]") for i, one in enumerate(given)]
        obj.sampling_params, answers = read, {_answers(one) for one in read}
        if len(answers) > 1:
            raise Refusal(
                f"{where} have unequal n.",
                "Give all prompts the same n: SGLang gives each equally many answers.",
            )
        return answers.pop()
    obj.sampling_params = _sampling(given, where)
    return _answers(obj.sampling_params)


def _answers(params: dict[str, Any]) -> int:
    """The number of requests that these sampling parameters make: one for a beam search."""
    return 1 if (params.get("beam_width") or 1) > 1 else int(params.get("n", 1))


def _sampling(given: Any, where: str) -> dict[str, Any]:
    """The sampling parameters of one request. `n` has no default that null could stand for."""
    read = Sampling.read_object(given, where, SamplingParams)
    if "n" in read and read["n"] is None:
        raise Refusal(f"{where}.n is None.", "Give a whole number, or leave it out.")
    return read


def _read_fields(obj: Any, size: Size) -> None:
    """Read all other fields. A list may have an entry for each prompt."""
    if obj.session_params is not None:
        obj.session_params = Session.read_object(
            obj.session_params, "session_params", SessionParams
        )
    for name in Request.model_fields:
        value = getattr(obj, name, None)  # another SGLang may lack it
        if value is None:
            continue
        if size.batched and name in FOR_EACH_PROMPT and _is_divided(name, value):
            _check_length(name, value, size.prompts or 1)
            setattr(obj, name, [_entry(name, i, entry) for i, entry in enumerate(value)])
        elif size.batched and name in DIVIDED:
            fix = "In a batch it must be a list of such values."
            raise Refusal(f"{name} is {shown(value)}.", fix)
        else:
            setattr(obj, name, Request.read({name: value})[name])


def _is_divided(name: str, value: Any) -> bool:
    """Whether a value is a list with an entry for each prompt, as SGLang decides."""
    if not isinstance(value, list):
        return False
    return name not in LISTS or any(isinstance(entry, list) for entry in value)


def _entry(name: str, i: int, value: Any) -> Any:
    """The value of a field for one prompt."""
    if value is None and name not in NULLABLE:
        raise Refusal(f"{name}[{i}] is None.", f"It must be {Request.expected(name)}.")
    return Request.read({name: value}, f"{{}}[{i}]")[name]


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
    if any(_each(obj.input_embeds)) and config.dtype != torch.bfloat16:
        raise Refusal(
            "input_embeds is given. SGLang makes bfloat16 of it, and the target computes in "
            f"{str(config.dtype).removeprefix('torch.')}.",
            "Send text or input_ids, or start the server with --dtype bfloat16.",
        )
    for vectors in _each(obj.input_embeds):
        for vector in vectors if isinstance(vectors[0], list) else [vectors]:
            _check_width("input_embeds", len(vector), config.hidden_size)
    if is_dflash(arguments) and any(_each(getattr(obj, "return_sampling_mask", None))):
        raise Refusal("return_sampling_mask is true.", "Leave it out: DFLASH has no such masks.")
    known = arguments.tokenizer_metrics_allowed_custom_labels or ()
    for label in obj.custom_labels or () if arguments.enable_metrics else ():
        if label not in known:
            raise Refusal(
                f"custom_labels has {shown(label)}.",
                "Leave it out, or start the server with it in "
                "--tokenizer-metrics-allowed-custom-labels.",
            )


def _check_one_of_two_servers(obj: Any, size: Size) -> None:
    """What SGLang serves in one server, but not where another server prefills."""
    if size.answers > 1:
        raise Refusal(
            f"n is {size.answers}, for which SGLang's prefill and decode servers wait in vain.",
            "Send the request several times.",
        )
    lacking = [name for name in OF_THE_PROMPT if any(_each(getattr(obj, name)))]
    if any(_each(obj.return_logprob)) and any(i >= 0 for i in _each(obj.logprob_start_len)):
        lacking.append("logprob_start_len")
    if lacking:
        raise Refusal(
            f"{lacking[0]} is given, and SGLang's prefill server keeps what is the prompt's.",
            "Leave it out, or ask a server without --disaggregation-mode.",
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
