"""From SGLang's annotations to validators: the values that a field of a request may hold.

Pydantic converts the values, so that the rest of SGLang sees the annotated types. Numbers follow
JSON Schema, which counts 64.0 among the whole numbers and "64" not among the numbers. `True` counts
as 1, as everywhere in Python. Arrays and scalars of NumPy become plain Python.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sglang_dflash.errors import Refusal, shown

UNIONS = (Union, types.UnionType)
NONE = type(None)


def as_python(value: Any) -> Any:
    """A value of NumPy, an array or a tensor as plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any) -> Any:
    """The value, unless it is text: pydantic would read "1" as a number."""
    if isinstance(value, str | bytes):
        raise ValueError("text is no number")
    return as_python(value)


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


def whole(low: int, high: int, expected: str | None = None) -> Any:
    """The annotation of a whole number from `low` to `high`."""
    expected = expected or f"a whole number from {low} to {high}"
    return Annotated[int, Field(ge=low, le=high, description=expected), BeforeValidator(_number)]


def number(**limits: float | bool) -> Any:
    """The annotation of a number. limits: as those of `pydantic.Field`."""
    limits.setdefault("allow_inf_nan", False)
    described: Any = {**limits, "description": "a finite number"}
    return Annotated[float, Field(**described), BeforeValidator(_number)]


INT32 = whole(-(2**31), 2**31 - 1, "a whole number of 32 bits")
SIMPLE: dict[Any, Any] = {
    int: whole(-(2**63), 2**63 - 1, "a whole number of 64 bits"),
    float: number(),
    bool: Annotated[bool, Field(description="true or false"), BeforeValidator(_number)],
    str: Annotated[str, Field(strict=True, description="text"), AfterValidator(_text)],
}
REGEX = Annotated[
    str,
    Field(strict=True, description="a regular expression"),
    AfterValidator(_text),
    AfterValidator(_compiled),
]

TAG = Annotated[  # SGLang takes an empty one for a grammar in one place, and for none in another
    str,
    Field(strict=True, min_length=1, description="a structural tag in JSON"),
    AfterValidator(_text),
]


def checked(annotation: Any) -> Any:
    """SGLang's annotation with this module's types in the place of Python's."""
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in UNIONS:
        return Union[tuple(checked(part) for part in inner)]  # noqa: UP007
    if origin is list and inner:
        return Annotated[list[checked(inner[0])], BeforeValidator(as_python)]  # type: ignore[misc]
    if origin is dict and inner:
        return dict[Any if inner[1] is Any else checked(inner[0]), checked(inner[1])]  # type: ignore[misc]
    return annotation


def description_of(annotation: Any) -> str:
    """The name of a checked annotation in a message, such as "a list of text"."""
    for entry in getattr(annotation, "__metadata__", ()):
        if isinstance(entry, FieldInfo) and entry.description:
            return entry.description
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return description_of(inner[0])
    if origin in UNIONS:
        return " or ".join(
            dict.fromkeys(description_of(part) for part in inner if part is not NONE)
        )
    if origin is list and inner:
        return f"a list whose entries are each {description_of(inner[0])}"
    if origin is dict and inner and inner[1] is not Any:
        return f"an object whose entries are each {description_of(inner[1])}"
    if dict in (origin, annotation):
        return "an object"
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    return getattr(origin or annotation, "__name__", str(annotation))


@dataclass(frozen=True)
class Rule:
    """The values that one field may hold."""

    adapter: TypeAdapter[Any]
    expected: str

    @classmethod
    def of(cls, annotation: Any) -> Rule:
        """The rule of a checked annotation."""
        return cls(TypeAdapter(annotation), description_of(annotation))

    def parse(self, value: Any, where: str) -> Any:
        """The value as SGLang's annotation has it. where: the field's name for a message."""
        try:
            return self.adapter.validate_python(value)
        except (ValidationError, RecursionError):
            raise Refusal(f"{where} is {shown(value)}.", f"It must be {self.expected}.") from None


@dataclass(frozen=True)
class Record:
    """The objects that have these fields and no others."""

    rules: Mapping[str, Rule]

    def parse(self, given: Any, where: str) -> dict[str, Any]:
        """The object with the values that the fields' rules make of its own."""
        if not isinstance(given, Mapping):
            raise Refusal(f"{where} is {shown(given)}.", "It must be an object.")
        for name in given:
            if name not in self.rules:
                raise Refusal(f"{where} has no field {shown(name)}.", "Leave it out.")
        return {name: self.rules[name].parse(given[name], f"{where}.{name}") for name in given}
