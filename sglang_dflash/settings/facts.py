"""What refusals are decided by: SGLang's arguments, the platform, the target and the draft."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.tensors import Tensors
from sglang_dflash.seam.flags import attention_tp_size
from sglang_dflash.settings.options import asked_ahead, asked_width, has_adapters
from sglang_dflash.settings.platforms import Platform, platform_of, verify_backend


@dataclass(frozen=True)
class Facts:
    """A server as its arguments describe it."""

    args: Any  # SGLang's server arguments

    @cached_property
    def platform(self) -> Platform:
        return platform_of(self.args)

    @cached_property
    def target(self) -> Any:
        """SGLang's `ModelConfig` of the target."""
        return self.args.get_model_config()

    @property
    def adapters(self) -> bool:
        return has_adapters(self.args)

    @property
    def attention_tp(self) -> int:
        return attention_tp_size(self.args)

    @property
    def verify_width(self) -> str:
        return asked_width(self.args)

    @property
    def draft_ahead(self) -> str:
        return asked_ahead(self.args)

    @property
    def attention_backends(self) -> str:
        """Those that are served, in words."""
        return ", ".join(self.platform.attention_backends)

    @property
    def one_attention_backend(self) -> str:
        """Any of them, in words."""
        return " or ".join(self.platform.attention_backends)

    @property
    def lora_backends(self) -> str:
        """Those that are served, in words."""
        return " or ".join(self.platform.lora_backends)

    @property
    def prefill(self) -> str:
        """The target's attention backend for prefill."""
        return str(self.args.get_attention_backends()[0])

    @property
    def decode(self) -> str:
        """The target's attention backend for one token a step."""
        return str(self.args.get_attention_backends()[1])

    @property
    def verify(self) -> str:
        """The target's attention backend for a block."""
        return verify_backend(self.args)

    @property
    def dtype(self) -> str:
        """The dtype that the target computes in."""
        return str(self.target.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class DraftFacts(Facts):
    """The same, and the draft."""

    draft: DFlashConfig
    tensors: Tensors
