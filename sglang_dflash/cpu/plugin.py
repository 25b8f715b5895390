"""The entry points `dflash_cpu` of `sglang.srt.plugins` and, since 0.5.23, of its platforms."""

from __future__ import annotations

from sglang_dflash.seam import release
from sglang_dflash.seam.hook import always, register


def dflash_cpu() -> None:
    """Let SGLang run on a machine without an accelerator."""
    if _has_accelerator() or release.installed() not in release.SERVED:
        return
    table = release.module("cpu", "hook_table")
    table.prepare()
    register((hook._replace(when=always) for hook in table.CPU_HOOKS), "sglang_dflash")


def platform() -> str | None:
    """The class of SGLang's platform on such a machine; None: SGLang looks for another one."""
    if _has_accelerator() or release.installed() != "0.5.23":
        return None
    return "sglang_dflash.cpu.v0_5_23.platform.TorchPlatform"


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is not None
