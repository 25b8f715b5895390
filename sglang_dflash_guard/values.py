"""The values that a field of a request may hold, and what a refused one is told.

Pydantic converts the values, so that the rest of SGLang sees its own types. Numbers follow JSON
Schema, which counts 64.0 among the whole numbers and "64" not among the numbers. `True` counts as
1, as everywhere in Python. Arrays and scalars of NumPy become plain Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import Refusal, shown
from sglang_dflash.seam import release

UNSET: Any = None  # the default of a field that is not given
STRONGEST_BIAS = 1e30  # decides as a larger one does, and stays finite when logits are scaled

# What SGLang's scheduler reads `custom_params` as; None: 0.5.13 takes objects of any kind.
PARAMS: Any = get_type_hints(SamplingParams).get("custom_params")


def as_python(value: Any) -> Any:
    """A value of NumPy, an array or a tensor as plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any) -> Any:
    """The value, unless it is text: pydantic would read "1" as a number."""
    if isinstance(value, str | bytes):
        raise ValueError("text is no number")
    return as_python(value)


def _mode(value: Any) -> Any:
    """The value, unless it is text that is no mode. SGLang 0.5.13 knows none."""
    return value if value == "last" and not release.has_own_scheduler_step() else _number(value)


def _text(value: str) -> str:
    """The text, unless it has half of a surrogate pair, which no encoding can write."""
    value.encode()  # UnicodeEncodeError is a ValueError
    return value


def _compiled(pattern: str) -> str:
    """The pattern, if Python's `re` can read it."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return pattern


def _readable(params: dict[Any, Any]) -> dict[Any, Any]:
    """The object, if SGLang's scheduler can read it from a message."""
    if PARAMS is not None:
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PARAMS)
        except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
    return params


def _bounded(bias: float) -> float:
    if bias != bias:
        raise ValueError("a bias is no NaN")
    return max(-STRONGEST_BIAS, min(STRONGEST_BIAS, bias))


@cache
def names_of(kind: Any) -> frozenset[str]:
    """The names that a class takes."""
    return frozenset(signature(kind).parameters)


NUMBER, LIST = BeforeValidator(_number), BeforeValidator(as_python)
TEXT = AfterValidator(_text)

Flag: TypeAlias = Annotated[bool, Field(description="true or false"), NUMBER]
HiddenStates: TypeAlias = Annotated[
    bool | Literal["last"],
    Field(description="true or false"),
    BeforeValidator(_mode),
]
Whole: TypeAlias = Annotated[
    int, Field(ge=-(2**63), lt=2**63, description="a whole number of 64 bits"), NUMBER
]
Int32: TypeAlias = Annotated[
    int, Field(ge=-(2**31), lt=2**31, description="a whole number of 32 bits"), NUMBER
]
Positive: TypeAlias = Annotated[
    int, Field(ge=1, lt=2**31, description=f"a whole number from 1 to {2**31 - 1}"), NUMBER
]
Number: TypeAlias = Annotated[
    float, Field(allow_inf_nan=False, description="a finite number"), NUMBER
]
Text: TypeAlias = Annotated[str, Field(strict=True, description="text"), TEXT]
Pattern: TypeAlias = Annotated[
    str,
    Field(strict=True, description="a regular expression"),
    TEXT,
    AfterValidator(_compiled),
]
# SGLang takes an empty tag for a grammar in one place, and for none in another.
Tag: TypeAlias = Annotated[
    str, Field(strict=True, min_length=1, description="a structural tag in JSON"), TEXT
]
Token: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # SGLang reads it from text, too
Bias: TypeAlias = Annotated[float, NUMBER, AfterValidator(_bounded)]
Biases: TypeAlias = Annotated[
    dict[Annotated[Token, AfterValidator(str)], Bias],  # names, as in JSON
    Field(description="an object whose entries are each a finite number"),
]
Object: TypeAlias = Annotated[dict[Any, Any], Field(description="an object")]
Params: TypeAlias = Annotated[
    dict[Any, Any],
    Field(description="an object of values, and of lists and objects of values"),
    AfterValidator(_readable),
]
Labels: TypeAlias = Annotated[
    dict[Text, Text], Field(description="an object whose entries are each text")
]
Texts: TypeAlias = Annotated[
    list[Text], LIST, Field(description="a list whose entries are each text")
]
Wholes: TypeAlias = Annotated[
    list[Whole], LIST, Field(description="a list whose entries are each a whole number of 64 bits")
]


class Fields(BaseModel):
    """Fields of a request, of any values that their types can be made of."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @classmethod
    def read(cls, given: Any, where: str = "{}") -> dict[str, Any]:
        """The values that are given, as the types have them. null stays null.

        where: how a message names a field, such as "sampling_params.{}". Raises `Refusal`.
        """
        said = {name: value for name, value in given.items() if value is not None}
        try:
            made = cls.model_validate(said)
        except ValidationError as error:
            name = str(error.errors(include_url=False)[0]["loc"][0])
            raise Refusal(
                f"{where.format(name)} is {shown(said[name])}.", f"It must be {cls.expected(name)}."
            ) from None
        return {**given, **{name: getattr(made, name) for name in said}}

    @classmethod
    def expected(cls, name: str) -> str:
        """What the value of a field must be, in a message."""
        return str(cls.model_fields[name].description)

    @classmethod
    def read_object(cls, given: Any, where: str, kind: Any) -> dict[str, Any]:
        """The same for an object that a client gives, of which SGLang makes an object of this kind.

        It has these fields and no others. SGLang's release may lack some of them.
        """
        if not isinstance(given, Mapping):
            raise Refusal(f"{where} is {shown(given)}.", "It must be an object.")
        for name in given:
            if name not in cls.model_fields or name not in names_of(kind):
                raise Refusal(f"{where} has no field {shown(name)}.", "Leave it out.")
        return cls.read(given, where + ".{}")
