"""What this package serves on SGLang 0.5.13.post1 and refuses on 0.5.23, and this release's flags.

The rules of every release come after these.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.engine.flag_rules import Flag
from sglang_dflash.errors import Rule
from sglang_dflash.settings.facts import Facts
from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from sglang_dflash.targets.hybrid import keeps_states

NOT_COMPARED = "it has not been compared with this package on SGLang 0.5.23"
OLDER = "Serve it with sglang==0.5.13.post1, or without --speculative-algorithm DFLASH."


def _flag(name: str, *served: object) -> Flag:
    return Flag(name, served, NOT_COMPARED, "Leave it out.")


NEW_FLAGS = (
    *(
        _flag(name, False)
        for name in (
            "speculative_use_block_verification",
            "speculative_use_rejection_sampling",
            "enable_prefill_cp",
            "enable_kv_cache_sharding",
            "enable_unified_memory",
            "enable_page_major_kv_layout",
            "enable_watermark",
            "enable_pd_role_switch",
            "enable_layernorm_sp",
            "enable_nvidia_megakernel",
            "enable_amd_monokernel",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
            "enable_return_aux_hidden_states",
            "enable_session_radix_cache",
            "enable_paged_experts",
            "enable_http_worker_reuseport",
            "smg_grpc_mode",
            "enable_dp_attention",
        )
    ),
    _flag("speculative_draft_sink_size", None),
    _flag("speculative_draft_kv_cache_dtype", None),
    _flag("attn_dp_size", None, 1),
    _flag("dcp_size", 1),
    _flag("dwdp_size", 1),
    _flag("decoupled_spec_role", "null"),
    _flag("aux_hidden_state_capture", None),
    _flag("ple_offload_embedding", None),
    _flag("uno_lora_path", None),
    _flag("sidecar", None),
    _flag("weight_cache_mode", "off"),
)
# What this package serves on the older release, or what this one lacks.
OLD_FLAGS = (
    _flag("enable_hierarchical_cache", False),
    _flag("disaggregation_mode", "null"),
    _flag("kv_cache_dtype", "auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
)


OWN_FLAGS: tuple[Rule[Facts], ...] = (
    Rule(
        "`--speculative-dflash-verify-width` other than full",
        lambda f: f.verify_width != "full" and f.verify_width,
        f"--speculative-dflash-verify-width (or {VERIFY_WIDTH}) {{found}} does not work with "
        "SGLang 0.5.23: its worker verifies whole blocks.",
        "Leave it out.",
    ),
    Rule(
        "`--speculative-dflash-draft-ahead off`",
        lambda f: f.draft_ahead == "off",
        f"--speculative-dflash-draft-ahead (or {DRAFT_AHEAD}) off does not work with SGLang "
        "0.5.23: its scheduler launches each step before it handles the one before.",
        "Leave it out, or give --disable-overlap-schedule.",
    ),
    Rule(
        "`--kv-cache-dtype fp8_e5m2` on a CPU",
        lambda f: f.args.kv_cache_dtype == "fp8_e5m2" and f.args.device == "cpu",
        "SGLang 0.5.23 does not keep KV in fp8_e5m2 {f.platform.place}.",
        "Give --kv-cache-dtype fp8_e4m3.",
    ),
)
FLAGS: tuple[Rule[Facts], ...] = tuple(flag.rule() for flag in (*NEW_FLAGS, *OLD_FLAGS))
TARGETS: tuple[Rule[Facts], ...] = (
    Rule(
        "targets with recurrent states",
        lambda f: keeps_states(f.target),
        "The target {f.args.model_path} has layers with recurrent states, which have not been "
        "compared with this package on SGLang 0.5.23.",
        OLDER,
    ),
)
# All rules, for docs/limits.md.
ALL: tuple[Rule[Any], ...] = (*FLAGS, *OWN_FLAGS, *TARGETS)
