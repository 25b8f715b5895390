"""A hook into SGLang: one row of a table, with one gate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from sglang_dflash.seam.flags import serves_dflash

logger = logging.getLogger(__name__)

Gate = Callable[..., bool]  # of the arguments of SGLang's function


def always(*_: Any, **__: Any) -> bool:
    """The gate of hooks that decide by themselves, or that no other algorithm reaches."""
    return True


class Hook(NamedTuple):
    """A function of ours on a function of SGLang's. It is called only where its gate is open."""

    target: str  # dotted name in sglang.srt, or in sglang if it begins with `kernels`
    kind: str  # HookType member
    function: str  # module:name in the package of its table, imported at first use
    why: str  # the reason why it must exist
    when: Gate = serves_dflash
    optional: bool = False  # SGLang's own function runs if ours cannot be imported


def register(hooks: Iterable[Hook], package: str) -> None:
    """Register hooks with SGLang, which applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _search_for_functions_alone()
    for hook in hooks:
        target = _full(hook.target)
        _owners.add(target.rpartition(".")[0])
        HookRegistry.register(target, _gated(hook, package), HookType[hook.kind])


def _full(target: str) -> str:
    return f"sglang.{target}" if target.startswith("kernels.") else f"sglang.srt.{target}"


_owners: set[str] = set()  # the modules and classes of targets


@cache
def _search_for_functions_alone() -> None:
    """Keep SGLang from searching all modules for other names of our targets that are methods.

    It searches for each hook, 20 to 50 ms: four seconds of a server's start. What a module imports
    is a class, never its method.
    """
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch

    def propagate(original: Any, wrapped: Any, owner: Any) -> int:
        method = isinstance(owner, type) and f"{owner.__module__}.{owner.__qualname__}" in _owners
        return 0 if method else search(original, wrapped, owner)

    hook_registry._propagate_patch = propagate


def missing(targets: Iterable[str]) -> dict[str, str]:
    """The targets on which SGLang has applied no hook, each with the reason."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    gone = [name for name in targets if _full(name) not in HookRegistry._patched]
    return {name: _why_missing(name) for name in gone}


def _why_missing(target: str) -> str:
    """Name the target, or its module if this cannot be imported: SGLang does not log that."""
    module, *parts = _full(target).split(".")
    for part in parts:
        module += f".{part}"
        try:
            import_module(module)
        except Exception as error:  # noqa: BLE001, a broken installation raises anything
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                break  # a class or a function
            return f"{module} cannot be imported ({error})"
    return f"no hook on {target}"


def _gated(hook: Hook, package: str) -> Callable[..., Any]:
    """The function that SGLang calls. Ours is imported at its first call.

    SGLang's modules load in their own order. A class that a function replaces is no class any more,
    so targets are functions and methods.
    """
    module_name, name = f"{package}.{hook.function}".split(":")
    first = 1 if hook.kind in ("AROUND", "AFTER") else 0  # after SGLang's function, or its result
    assert hook.kind != "REPLACE" or hook.when is always, hook

    @cache
    def module() -> Any:
        try:
            return import_module(module_name)
        except Exception as error:
            if not hook.optional:
                raise
            logger.warning("%s cannot be imported (%s). So %s.", module_name, error, hook.why)
            return None

    def call(*args: Any, **kwargs: Any) -> Any:
        ours = module() if hook.when(*args[first:], **kwargs) else None
        if ours is not None:
            return getattr(ours, name)(*args, **kwargs)
        return args[0](*args[1:], **kwargs) if hook.kind == "AROUND" else None

    call.__qualname__ = hook.function
    return call
