"""The entry point `dflash` of `sglang.srt.plugins`: it takes over `--speculative-algorithm DFLASH`.

If a plugin fails, SGLang only logs the error and falls back to its built-in DFLASH. So `dflash`
first replaces the creation of the DFLASH worker. The replacement refuses to create a worker unless
everything below is in place. Nothing that can fail comes before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash.seam import release
from sglang_dflash.seam.flags import is_dflash
from sglang_dflash.seam.hook import missing, register
from sglang_dflash.seam.http import HTTP_HOOKS, prepare
from sglang_dflash.watch.page import add_page

CPU_PLUGIN = "dflash_cpu"


def dflash() -> None:
    """Take over `--speculative-algorithm DFLASH`."""
    _guard_dflash()
    _print_refusals_plainly()
    if release.installed() not in release.SERVED:
        return
    hooks = release.module("engine", "hook_table")
    register(hooks.DFLASH_HOOKS, "sglang_dflash")
    prepare(is_dflash, add_page)
    if _has_cuda():
        register(hooks.CUDA_HOOKS, "sglang_dflash")  # their targets load only on CUDA


def missing_parts() -> list[str]:
    """Reasons why a DFLASH server must not start; empty if everything is in place."""
    if release.installed() not in release.SERVED:
        return [f"SGLang is {release.installed()}, this release serves {release.NAMES}"]
    hooks = release.module("engine", "hook_table")
    wanted = [hook.target for hook in (*hooks.DFLASH_HOOKS, *HTTP_HOOKS)]
    if _has_cuda():
        wanted += [hook.target for hook in hooks.CUDA_HOOKS]
    elif not _has_accelerator():
        of_cpu = _targets_of(CPU_PLUGIN)
        if not of_cpu:
            return [f"the plugin {CPU_PLUGIN} is not loaded"]
        wanted += of_cpu
    return list(dict.fromkeys(missing(wanted).values()))


def _targets_of(plugin: str) -> list[str]:
    """The targets on which a plugin has registered hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = []
    for target, hooks in HookRegistry._hooks.items():
        if any(source is not None and source.plugin_name == plugin for *_, source in hooks):
            targets.append(target.removeprefix("sglang.").removeprefix("srt."))
    return targets


def _guard_dflash() -> None:
    """Guard the creation of the DFLASH worker, and check its arguments before children start."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    create_worker = SpeculativeAlgorithm.create_worker

    def guarded_create(self: Any, server_args: Any) -> Any:
        if not self.is_dflash():
            return create_worker(self, server_args)
        _refuse_if_incomplete()
        from sglang.srt.models.registry import ModelRegistry

        build = release.module("engine", "build")
        ModelRegistry.register(build.MODELS, overwrite=True)
        return build.build_worker

    SpeculativeAlgorithm.create_worker = guarded_create
    _before_speculation(_check_arguments)


def _check_arguments(server_args: Any, handle: Callable[[Any], None]) -> None:
    """Around SGLang's handling of the arguments of speculation."""
    if is_dflash(server_args):
        _refuse_if_incomplete()
        from sglang_dflash.engine.server_args import check_first

        check_first(server_args)
    elif server_args.speculative_algorithm is None:
        _refuse_flags_of_a_draft(server_args)
    handle(server_args)


def _before_speculation(check: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Let `check` run around `handle_speculative_decoding`, in any release."""
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:  # before 0.5.20
        from sglang.srt.arg_groups import speculative_hook

        handle = speculative_hook.handle_speculative_decoding
        speculative_hook.handle_speculative_decoding = lambda args: check(args, handle)
    else:
        register_resolution_hook("handle_speculative_decoding")(check)


def _refuse_if_incomplete() -> None:
    from sglang_dflash.errors import Refusal

    missing = missing_parts()
    if missing:
        raise Refusal(
            f"sglang-dflash cannot serve DFLASH here: {'; '.join(missing)}.",
            f"Install {release.PINS} and load both plugins (leave SGLANG_PLUGINS unset), "
            "or leave the plugin dflash out of SGLANG_PLUGINS to run SGLang's own DFLASH.",
        )


def _refuse_flags_of_a_draft(server_args: Any) -> None:
    """They have no effect without an algorithm, and SGLang does not say so."""
    from sglang_dflash.engine.flag_rules import WITHOUT_ALGORITHM
    from sglang_dflash.errors import refuse
    from sglang_dflash.settings.facts import Facts

    refuse([WITHOUT_ALGORITHM], Facts(server_args))


def _print_refusals_plainly() -> None:
    """Print a `Refusal` that ends the process as one paragraph on stderr, without a traceback."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if kind.__module__ == "sglang_dflash.errors":
            print(f"sglang-dflash: {error}", file=sys.stderr)
        else:
            shown(kind, error, trace)

    sys.excepthook = excepthook


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is not None


def _has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()
