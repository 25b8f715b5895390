"""Typed access to a raw config. A wrong or missing field is refused by its file and its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_dflash.checkpoint.config import Rope
from sglang_dflash.checkpoint.known_keys import DIRECTION
from sglang_dflash.errors import Refusal, shown

CORRECT_CONFIG = "Fetch the draft again, or correct its config.json."
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
FIRST_SLIDING_LAYER = 28  # Transformers' default of max_window_layers
# Bounds of what a config may state. Tensors bound the other sizes of a draft (`tensors.faults`).
MOST_LAYERS = 1000  # of a draft or a target
MOST_POSITIONS = 256  # that a draft reads at once; published drafts read 7 to 16
LARGEST_INT = 2**31 - 1  # kernels count in int32
LARGEST_NUMBER = 1e30  # further ones become infinite when float32 multiplies them
# Fields of each RoPE type that is served: numbers that must be there, and others that may be.
ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
}
# All fields of RoPE. A draft's positions count tokens, so M-RoPE's sections rotate by the same one.
ROPE_KEYS = {
    *("rope_theta", "rope_type", "type", "truncate", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved", "finetuned"),
    *(key for numbers in ROPE_NUMBERS.values() for part in numbers for key in part),
}


class Fields:
    """A JSON object that is read field by field.

    Every method names a field by its key. It raises `Refusal` if the field has another type or
    range. A field that is null is absent.
    """

    def __init__(self, raw: dict[str, Any], file: str, section: str | None = None) -> None:
        """raw: the object. file, section: its place, by which refusals name it."""
        self.raw = raw
        self.section_name = section
        self._file = file
        self._place = f"The file {file}" if section is None else f"The section {section} of {file}"

    def refuse(self, what: str, fix: str = CORRECT_CONFIG) -> Refusal:
        """A refusal to raise. `what` begins with a verb, and this object is its subject."""
        return Refusal(f"{self._place} {what}.", fix)

    def over(self, others: dict[str, Any]) -> Fields:
        """The fields of this object, and those of another one where they are absent."""
        stated = {key: value for key, value in self.raw.items() if value is not None}
        return Fields(others | stated, self._file)

    def agreed(self, sections: Iterable[Fields], keys: Iterable[str]) -> Fields:
        """The fields `keys`, each from the place that states it: this object or a section of it.

        Raises `Refusal` if two places state different values.
        """
        stated: dict[str, Any] = {}
        for key in keys:
            for place in (self, *sections):
                value = place.raw.get(key)
                if value is None:
                    continue
                if key in stated and stated[key] != value:
                    raise self.refuse(
                        f"has {key} = {shown(stated[key])}, but {shown(value)} in its "
                        f"{place.section_name}"
                    )
                stated[key] = value
        return Fields(stated, self._file)

    def direction(self, sections: Iterable[Fields]) -> bool | None:
        """Whether all layers are causal in the block, by any of the keys in `DIRECTION`.

        None: neither this object nor a section states it. Raises `Refusal` if two keys differ.
        """
        causal = None
        first = ""
        for place in (self, *sections):
            for key in DIRECTION:
                value = place.optional_boolean(key)
                if value is None:
                    continue
                stated = f"{key} = {value}"
                if place.section_name is not None:
                    stated += f" in its {place.section_name}"
                if causal is not None and value != causal:
                    raise self.refuse(f"has {first}, but {stated}")
                causal = value
                first = stated
        return causal

    def known(self, *keys: Iterable[str]) -> None:
        """Each field must have one of these keys, or be null.

        Any other key may change what a draft computes, so it cannot be read over.
        """
        unknown = {}
        for key in self.raw.keys() - set().union(*keys):
            if self.raw[key] is not None:
                unknown[key] = self.raw[key]
        if unknown:
            raise self.refuse(
                f"has keys that are not known, and may change what the draft computes: "
                f"{shown(unknown)}",
                "If they are of training alone, remove them from config.json. Else use another "
                "draft.",
            )

    def only(self, served: dict[str, Any]) -> None:
        """Each of these fields must be absent or have this value. None: it must be absent.

        They change what a draft computes without a tensor that would show it.
        """
        for key, value in served.items():
            stated = self.raw.get(key)
            if stated is not None and stated != value:
                served_one = "none" if value is None else repr(value)
                raise self.refuse(
                    f"has {key} = {shown(stated)}, and only {served_one} is served",
                    "Use another draft.",
                )

    def must_be(self, key: str, *served: str) -> None:
        """The field must be absent or have one of these values, because no others are served."""
        stated = self.raw.get(key)
        if stated is not None and stated not in served:
            values = " and ".join(map(repr, served))
            verb = "is" if len(served) == 1 else "are"
            raise self.refuse(f"has {key} = {shown(stated)}, and only {values} {verb} served")

    def optional_object(self, key: str) -> dict[str, Any] | None:
        """A nested object, as it is."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(f"has {key} = {shown(value)}, which must be an object")
        return value

    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config`, which names its method."""
        described = self.optional_object("quantization_config")
        if described is not None and not isinstance(described.get("quant_method"), str):
            raise self.refuse("has a quantization_config that names no quant_method")
        return described

    def section(self, key: str) -> Fields:
        """The fields of a nested object. It has none if it is absent."""
        return Fields(self.optional_object(key) or {}, self._file, key)

    def optional_name(self, key: str) -> str | None:
        """A text."""
        value = self.raw.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(f"has {key} = {shown(value)}, which must be a name")

    def names(self, key: str) -> list[str]:
        """A list of names. It is empty if the field is absent."""
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refuse(f"has {key} = {shown(value)}, which must be a list of names")
        return value

    def optional_int(self, key: str, most: int = LARGEST_INT) -> int | None:
        """An integer from 0 to `most`."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refuse(f"has {key} = {shown(value)}, which must be a non-negative integer")
        if value > most:
            raise self.refuse(f"has {key} = {shown(value)}, which must be at most {most}")
        return value

    def optional_positive(self, key: str, most: int = LARGEST_INT) -> int | None:
        """An integer from 1 to `most`."""
        value = self.optional_int(key, most)
        if value == 0:
            raise self.refuse(f"has {key} = 0, which must be positive")
        return value

    def positive(self, key: str, most: int = LARGEST_INT) -> int:
        """An integer from 1 to `most`, which must be there."""
        value = self.optional_positive(key, most)
        if value is None:
            raise self.refuse(f"has no {key}")
        return value

    def optional_boolean(self, key: str) -> bool | None:
        """True or false."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, bool):
            raise self.refuse(f"has {key} = {shown(value)}, which must be true or false")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """True or false. default: the value of an absent field."""
        value = self.optional_boolean(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        """A number that float32 can hold."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(f"has {key} = {shown(value)}, which must be a number")
        if not abs(value) <= LARGEST_NUMBER:  # NaN is not, either
            raise self.refuse(f"has {key} = {shown(value)}, which is not a number of float32")
        return float(value)

    def number(self, key: str, default: float) -> float:
        """A number that float32 can hold. default: the value of an absent field."""
        value = self.optional_number(key)
        return default if value is None else value

    def optional_positive_number(self, key: str) -> float | None:
        """A number above 0."""
        value = self.optional_number(key)
        if value is not None and value <= 0:
            raise self.refuse(f"has {key} = {value}, which must be positive")
        return value

    def positive_number(self, key: str, default: float) -> float:
        """A number above 0. default: the value of an absent field."""
        value = self.optional_positive_number(key)
        return default if value is None else value

    def optional_layer_ids(self, key: str, embedding: int) -> list[int] | None:
        """At least one layer id, in ascending order, each once.

        embedding: the id of the embedding's output in this format.
        """
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, list) and embedding in value:
            raise self.refuse(
                f"has {key} = {shown(value)}, where {embedding} is the output of the embedding, "
                "which SGLang's models do not return",
                "Use a draft that reads outputs of layers only.",
            )
        if not isinstance(value, list) or not value or not _ascending(value):
            raise self.refuse(
                f"has {key} = {shown(value)}, which must be layer ids in ascending order, each once"
            )
        if value[-1] > MOST_LAYERS:
            raise self.refuse(f"has {key} = {shown(value)}, which must be at most {MOST_LAYERS}")
        return value

    def window(self) -> int | None:
        """`sliding_window`. None if it is absent or `use_sliding_window` is false."""
        window = self.optional_positive("sliding_window")
        return window if self.boolean("use_sliding_window", True) else None

    def layer_types(self, num_layers: int) -> list[str]:
        """`layer_types`, one of `LAYER_TYPES` per layer.

        Transformers' rule replaces an absent list: layers slide from `max_window_layers` on.
        """
        value = self.raw.get("layer_types")
        if value is None:
            return self._default_layer_types(num_layers)
        if not isinstance(value, list) or len(value) != num_layers:
            raise self.refuse(
                f"has layer_types = {shown(value)}, which must name {num_layers} layers"
            )
        strange = sorted({shown(kind) for kind in value if kind not in LAYER_TYPES})
        if strange:
            raise self.refuse(
                f"has layer_types {shown(strange)}, and only {' and '.join(LAYER_TYPES)} are served"
            )
        return value

    def _default_layer_types(self, num_layers: int) -> list[str]:
        slides = self.boolean("use_sliding_window", False) and self.window() is not None
        first = self.optional_int("max_window_layers")
        if first is None:
            first = FIRST_SLIDING_LAYER
        kinds = []
        for layer in range(num_layers):
            kinds.append(SLIDING if slides and layer >= first else FULL)
        return kinds

    def rope(self, layer_types: list[str]) -> tuple[Rope, ...]:
        """The RoPE of each layer.

        A config states it in flat fields (`rope_theta`, `rope_scaling`) or in `rope_parameters` of
        Transformers 5, which are one object for all layers or one per layer type.
        """
        parameters, scaling = self.raw.get("rope_parameters"), self.raw.get("rope_scaling")
        if not isinstance(parameters, dict) or parameters.keys().isdisjoint(LAYER_TYPES):
            return (self._same_rope(parameters, scaling),) * len(layer_types)
        if scaling not in (None, parameters):
            raise self.refuse("has a rope_scaling beside rope_parameters of each layer type")
        ropes = []
        for kind in layer_types:
            if kind not in parameters:
                raise self.refuse(f"has no rope_parameters for {kind}")
            ropes.append(self._one_rope(parameters[kind]))
        return tuple(ropes)

    def _same_rope(self, parameters: Any, scaling: Any) -> Rope:
        """The RoPE of all layers, by `rope_parameters` or `rope_scaling`, which must agree."""
        rope = self._one_rope(scaling if parameters is None else parameters)
        flat = self.optional_number("rope_theta")
        if flat not in (None, rope.theta):
            raise self.refuse(f"has rope_theta = {flat:g}, but {rope.theta:g} in its RoPE section")
        if parameters is not None and scaling is not None:
            other = self._one_rope(scaling, rope.theta)
            if other != rope:
                raise self.refuse(
                    f"has rope_scaling = {shown(scaling)}, but rope_parameters = "
                    f"{shown(parameters)}"
                )
        return rope

    def _one_rope(self, parameters: Any, default_theta: float | None = None) -> Rope:
        """The RoPE that `rope_parameters` or `rope_scaling` describe. `rope_theta` may be flat.

        default_theta: of a config that states none.
        """
        if parameters is not None and not isinstance(parameters, dict):
            raise self.refuse(f"has RoPE parameters {shown(parameters)}, which must be an object")
        fields = Fields(parameters or {}, self._file, "RoPE")
        flat = Fields({"rope_theta": self.raw.get("rope_theta")}, self._file)
        outer = flat.over({"rope_theta": default_theta}).raw
        theta = fields.over(outer).optional_positive_number("rope_theta")
        if theta is None or theta <= 1:  # YaRN divides by its logarithm
            raise self.refuse("has no rope_theta above 1, neither flat nor in rope_parameters")
        fields.only({"partial_rotary_factor": 1.0})
        older, kind = fields.optional_name("type"), fields.optional_name("rope_type")
        # Transformers writes the type "default" beside the older name "mrope" of Qwen's M-RoPE.
        if kind is not None and older not in (None, "mrope", kind):
            raise fields.refuse(f"has rope_type = {shown(kind)}, but type = {shown(older)}")
        kind = kind or older or "default"
        if kind == "default" or kind in ROPE_NUMBERS:
            fields.known(ROPE_KEYS)
        if kind == "default":
            return Rope(theta)
        if kind == "yarn":
            # Transformers' rule: the factor counts from max_position_embeddings
            longest = self.positive("max_position_embeddings")
            fields = fields.over({"original_max_position_embeddings": longest})
        return Rope(theta, {"rope_type": kind} | fields._scaling(kind))

    def _scaling(self, kind: str) -> dict[str, Any]:
        """The fields that a RoPE type has. A type that is not served has none."""
        required, optional = ROPE_NUMBERS.get(kind, ((), ()))
        scaling: dict[str, Any] = {}
        for key in required:
            if self.optional_positive_number(key) is None:
                raise self.refuse(f"has no {key}, which RoPE of type {kind} needs")
            scaling[key] = self.raw[key]
        for key in optional:
            value = self.optional_number(key)
            if value is not None:
                if value < 0:
                    raise self.refuse(f"has {key} = {value}, which must not be negative")
                scaling[key] = self.raw[key]
        truncate = self.optional_boolean("truncate")
        if truncate is not None:
            scaling["truncate"] = truncate
        return scaling


def _ascending(ids: list[Any]) -> bool:
    """Whether these are integers from 0 on, each larger than the one before it."""
    last = -1
    for i in ids:
        if type(i) is not int or i <= last:  # JSON's true is an int to isinstance
            return False
        last = i
    return True
