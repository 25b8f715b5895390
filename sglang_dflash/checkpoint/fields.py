"""The fields of a checkpoint's JSON files: their types, and refusals that name file, key and value.

A model, derived from `Fields`, declares the fields of an object once. `Place.read` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    InstanceOf,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from sglang_dflash.errors import Refusal, shown

CORRECT_CONFIG = "Fetch the draft again, or correct its config.json."
# Bounds of what a config may state. Tensors bound the other sizes of a draft (`tensors.faults`).
MOST_LAYERS = 1000  # of a draft or a target
MOST_POSITIONS = 256  # that a draft reads at once; published drafts read 7 to 16
LARGEST_INT = 2**31 - 1  # kernels count in int32
LARGEST_NUMBER = 1e30  # further ones become infinite when float32 multiplies them


def must_be(words: str) -> WrapValidator:
    """Says what the values of a type must be, where pydantic's own words would be less clear."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("words", "must be {words}", {"words": words}) from None

    return WrapValidator(check)


def _ascending(ids: list[int]) -> list[int]:
    if ids != sorted(set(ids)):
        raise ValueError
    return ids


def _with_method(config: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(config.get("quant_method"), str):
        raise PydanticCustomError("words", "names no quant_method")
    return config


Unread: TypeAlias = Any  # of a key that is known, and that changes nothing or is read elsewhere
Flag: TypeAlias = Annotated[bool, must_be("true or false")]
Name: TypeAlias = Annotated[InstanceOf[str], must_be("a name")]  # a `str` has no half surrogates
Names: TypeAlias = Annotated[
    list[InstanceOf[str]], Field(fail_fast=True), must_be("a list of names")
]
Object: TypeAlias = Annotated[InstanceOf[dict[str, Any]], must_be("an object")]
Quantization: TypeAlias = Annotated[Object, AfterValidator(_with_method)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Positive: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NumLayers: TypeAlias = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
NumPositions: TypeAlias = Annotated[int, Field(ge=1, le=MOST_POSITIONS)]
Number: TypeAlias = Annotated[
    float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER), must_be("a number of float32")
]
PositiveNumber: TypeAlias = Annotated[Number, Field(gt=0)]
# Some formats count the embedding's output as -1, which `transformer.layers_of` refuses.
LayerIds: TypeAlias = Annotated[
    list[Annotated[int, Field(ge=-1, le=MOST_LAYERS)]],
    Field(min_length=1, fail_fast=True),
    AfterValidator(_ascending),
    must_be(f"layer ids in ascending order, each once, and must be at most {MOST_LAYERS}"),
]


class Fields(BaseModel):
    """Fields of an object, each of exactly its type: true is no integer. It may have others.

    A field that counts only where others say so is `Unread`, and `Place.one` reads it.
    """


F = TypeVar("F", bound=Fields)


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The check of a type, which takes a while to make."""
    return TypeAdapter(kind)


class Place:
    """A JSON object and where it stands. A field that is null is absent.

    raw: its fields. section: its key in the object around it, empty for a whole file.
    """

    def __init__(self, raw: dict[str, Any], file: str, section: str = "") -> None:
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.section_name = section
        self.file = file
        self._name = f"The section {section} of {file}" if section else f"The file {file}"

    def refuse(self, what: str, fix: str = CORRECT_CONFIG) -> Refusal:
        """A refusal to raise. `what` begins with a verb, and this object is its subject."""
        return Refusal(f"{self._name} {what}.", fix)

    def section(self, key: str) -> Place:
        """The object in a field, without fields if it is absent. Raises `Refusal`."""
        return Place(self.one(key, Object, {}), self.file, key)

    def read(self, model: type[F]) -> F:
        """The fields of a model. Raises `Refusal` for one that is missing or has another type."""
        stated = {key: self.raw[key] for key in model.model_fields if key in self.raw}
        fields: F = self._checked(model, stated)
        return fields

    def one(self, key: str, kind: Any, default: Any = None) -> Any:
        """A field of this type, or the default of an absent one. Raises `Refusal`."""
        return self._checked(kind, self.raw[key], key) if key in self.raw else default

    def _checked(self, kind: Any, value: Any, *key: str) -> Any:
        """The value of a type. key: the field's, if it is no model's. Raises `Refusal`."""
        try:
            return _adapter(kind).validate_python(value, strict=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
        place = [*key, *map(str, wrong["loc"])]
        if wrong["type"] == "missing":
            raise self.refuse(f"has no {place[0]}")
        field = place[0] + "".join(f"[{entry}]" for entry in place[1:])
        must = wrong["msg"].replace("Input should", "must")
        raise self.refuse(f"has {field} = {shown(wrong['input'])}, which {must}")

    def only(self, served: dict[str, Any]) -> None:
        """Each of these fields must be absent or have this value. None: it must be absent.

        They change what a draft computes without a tensor that would show it. Raises `Refusal`.
        """
        for key, value in served.items():
            stated = self.raw.get(key, value)
            if stated != value:
                served_one = "none" if value is None else repr(value)
                raise self.refuse(
                    f"has {key} = {shown(stated)}, and only {served_one} is served",
                    "Use another draft.",
                )

    def known(self, *keys: Iterable[str]) -> None:
        """Each field must have one of these keys. Raises `Refusal`.

        Any other key may change what a draft computes, so it cannot be read over.
        """
        known = set().union(*keys)
        unknown = {key: value for key, value in self.raw.items() if key not in known}
        if unknown:
            raise self.refuse(
                f"has keys that are not known, and may change what the draft computes: "
                f"{shown(unknown)}",
                "If they are of training alone, remove them from config.json. Else use another "
                "draft.",
            )
