"""Typed access to a raw config: a wrong or missing field is refused by file and name."""

from __future__ import annotations

from typing import Any

from sglang_dflash.errors import Refusal


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

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling) from flat `rope_theta` and `rope_scaling`, or from `rope_parameters`."""
        parameters = self.raw.get("rope_parameters")
        scaling = dict(parameters if parameters is not None else self.raw.get("rope_scaling") or {})
        theta = scaling.pop("rope_theta", self.raw.get("rope_theta"))
        if not isinstance(theta, int | float):
            raise self.refuse("has no rope_theta, neither flat nor in rope_parameters")
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        if scaling.get("rope_type", "default") == "default":
            return float(theta), None
        return float(theta), scaling
