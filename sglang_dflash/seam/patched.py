"""Fields of SGLang's objects that have another value during a call of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **fields: Any) -> Iterator[None]:
    """Give an object other values of these fields. Afterwards it has its own again."""
    own = {name: getattr(owner, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)
