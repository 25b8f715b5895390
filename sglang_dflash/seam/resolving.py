"""SGLang's arguments while it resolves them. Since 0.5.19, they are not written to any more."""

from __future__ import annotations

from typing import Any

SOURCE = "sglang_dflash"
# Arguments that SGLang 0.5.23 has no more, with the value that stands for "not given".
GONE = {
    "enable_expert_distribution_metrics": False,
    "enable_prefill_context_parallel": False,
    "enforce_piecewise_cuda_graph": False,
    "mamba_scheduler_strategy": "auto",
    "torchao_config": "",
}


class Arguments:
    """The arguments with the interface of earlier releases.

    Reading gives what is decided so far. Writing declares a decision, or hangs an attribute of this
    package on SGLang's object.
    """

    def __init__(self, record: Any) -> None:
        vars(self)["_record"] = record

    def __getattr__(self, name: str) -> Any:
        if name in GONE:
            return GONE[name]
        from sglang.srt.arg_groups.model_override_base import resolving_view

        return getattr(resolving_view(self._record), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("dflash"):
            vars(self._record)[name] = value
            return
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(self._record, SOURCE, **{name: value})

    def get_model_config(self) -> Any:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(self._record)

    def get_attention_backends(self) -> Any:
        from sglang.srt.arg_groups.model_override_base import attention_backends_of

        return attention_backends_of(self)
