"""Typed access to a raw config: a wrong or missing field is refused by file and name."""

from __future__ import annotations

from typing import Any

from sglang_dflash.config import Rope
from sglang_dflash.errors import Refusal

LAYER_TYPES = ("full_attention", "sliding_attention")


class Fields:
    """A JSON object read field by field. `where` names it in messages."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def refuse(self, what: str) -> Refusal:
        return Refusal(f"{self.where} {what}.")

    def section(self, key: str) -> Fields:
        """A nested object; empty where absent."""
        value = self.raw.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(f"has {key} = {value!r}, which must be an object")
        return Fields(value, f"{self.where}: {key}")

    def must_be(self, key: str, value: str) -> None:
        """A field that is served with one value alone, where it is stated."""
        if (stated := self.raw.get(key)) not in (None, value):
            raise self.refuse(f"has {key} = {stated!r}; served is {value!r}")

    def optional_int(self, key: str) -> int | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refuse(f"has {key} = {value!r}, which must be a non-negative integer")
        return value

    def optional_positive(self, key: str) -> int | None:
        value = self.optional_int(key)
        if value == 0:
            raise self.refuse(f"has {key} = 0, which must be positive")
        return value

    def positive(self, key: str) -> int:
        value = self.optional_positive(key)
        if value is None:
            raise self.refuse(f"has no {key}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(f"has {key} = {value!r}, which must be true or false")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(f"has {key} = {value!r}, which must be a number")
        return float(value)

    def positive_number(self, key: str) -> float | None:
        """None where absent."""
        if self.raw.get(key) is None:
            return None
        value = self.number(key, 0.0)
        if not 0 < value < float("inf"):
            raise self.refuse(f"has {key} = {value}, which must be positive")
        return value

    def optional_ints(self, key: str) -> list[int] | None:
        """Strictly ascending non-negative ids."""
        value: list[int] | None = self.raw.get(key)
        if value is None:
            return None
        good = isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
        if not good or not value or sorted(set(value)) != value:
            raise self.refuse(
                f"has {key} = {value!r}, which must be layer ids in ascending order, each once"
            )
        return value

    def window(self) -> int | None:
        """`sliding_window`, None where absent or switched off by `use_sliding_window`."""
        stated = self.optional_positive("sliding_window")
        return stated if self.boolean("use_sliding_window", True) else None

    def layer_types(self, num_layers: int) -> list[str]:
        """`layer_types`; where absent Transformers' rule: layers slide from `max_window_layers`."""
        value = self.raw.get("layer_types")
        if value is None:
            slides = self.boolean("use_sliding_window", False) and self.window() is not None
            first = self.optional_int("max_window_layers")
            full = num_layers if not slides else 28 if first is None else first
            return [LAYER_TYPES[i >= full] for i in range(num_layers)]
        if not isinstance(value, list) or len(value) != num_layers:
            raise self.refuse(f"has layer_types = {value!r}, which must name {num_layers} layers")
        if strange := sorted({str(v) for v in value if v not in LAYER_TYPES}):
            raise self.refuse(f"has layer_types {strange}; served are {', '.join(LAYER_TYPES)}")
        return value

    def rope(self, layer_types: list[str]) -> tuple[Rope, ...]:
        """RoPE of each layer.

        Flat `rope_theta` and `rope_scaling`, or `rope_parameters` of Transformers 5, for all layers
        or by layer type.
        """
        parameters = self.raw.get("rope_parameters")
        if isinstance(parameters, dict) and set(parameters) & set(LAYER_TYPES):
            if missing := set(layer_types) - set(parameters):
                raise self.refuse(f"has no rope_parameters for {', '.join(sorted(missing))}")
            return tuple(self._one_rope(parameters[kind]) for kind in layer_types)
        if parameters is None:
            parameters = self.raw.get("rope_scaling")
        return tuple(self._one_rope(parameters) for _ in layer_types)

    def _one_rope(self, parameters: Any) -> Rope:
        if parameters is not None and not isinstance(parameters, dict):
            raise self.refuse(f"has RoPE parameters {parameters!r}, which must be an object")
        scaling = dict(parameters or {})
        theta = scaling.pop("rope_theta", self.raw.get("rope_theta"))
        if not isinstance(theta, int | float) or theta <= 0:
            raise self.refuse("has no rope_theta, neither flat nor in rope_parameters")
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        kind = scaling.get("rope_type", "default")
        if kind == "default":
            return Rope(float(theta))
        if kind == "yarn" and "original_max_position_embeddings" not in scaling:
            # Transformers' rule: the factor counts from the served length
            scaling["original_max_position_embeddings"] = self.positive("max_position_embeddings")
        return Rope(float(theta), scaling)
