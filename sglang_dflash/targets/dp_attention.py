"""DP attention (`--enable-dp-attention`): replicas that share the target's MLPs and experts.

A replica is the ranks of one attention-TP group. It drafts alone. In a forward of the target all
replicas take part (`Verifier.idle`), and all blocks have one width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from sglang_dflash.errors import WITHOUT_DFLASH, Rule, refuse
from sglang_dflash.model.target_parts import lm_head, token_embedding
from sglang_dflash.settings.facts import DraftFacts, Facts
from sglang_dflash.settings.options import FLAGS, VERIFY_WIDTH
from sglang_dflash.targets.hybrid import keeps_gdn_states

WITHOUT_DP_ATTENTION = "Leave --enable-dp-attention out."
RULES: tuple[Rule[DraftFacts], ...] = (
    Rule(
        f"`--enable-dp-attention` with `{FLAGS[VERIFY_WIDTH]}` other than full",
        lambda f: f.verify_width != "full",
        f"{FLAGS[VERIFY_WIDTH]} (or {VERIFY_WIDTH}) {{f.verify_width}} does not work with "
        "--enable-dp-attention: all replicas verify blocks of one width.",
        "Give full. --speculative-dflash-block-size makes blocks narrower.",
    ),
    Rule(
        "`--enable-dp-attention`, block sizes that attention TP (`--tp-size` / `--dp-size`) does "
        "not divide",
        lambda f: f.args.speculative_num_draft_tokens % f.attention_tp,
        "A block of {f.args.speculative_num_draft_tokens} tokens cannot be divided among the "
        "{f.attention_tp} ranks of a replica, as SGLang does after an MLP.",
        "Give a --speculative-dflash-block-size that --tp-size / --dp-size divides.",
    ),
    Rule(
        "`--enable-dp-attention` with LoRA adapters, `--enable-hierarchical-cache`, hybrid or "
        "multimodal targets",
        lambda f: (
            (f.adapters and "LoRA adapters")
            or (f.args.enable_hierarchical_cache and "--enable-hierarchical-cache")
            or (keeps_gdn_states(f.target) and "a target with recurrent states")
            or (f.target.is_multimodal and "a target that reads images")
        ),
        "--enable-dp-attention has not been compared with {found}.",
        WITHOUT_DP_ATTENTION,
    ),
    Rule(
        "`--enable-dp-attention` with `--enable-dp-attention-local-control-broadcast`",
        lambda f: f.args.enable_dp_attention_local_control_broadcast,
        "--enable-dp-attention-local-control-broadcast does not work with DFLASH: replicas would "
        "get new weights of the draft in different steps, and wait for each other.",
        "Leave it out.",
    ),
    Rule(
        "`--enable-dp-attention` with a recorder of experts, or `--enable-eplb`",
        lambda f: (
            f.args.enable_eplb
            or f.args.enable_expert_distribution_metrics
            or f.args.expert_distribution_recorder_mode is not None
        ),
        "SGLang's recorder of experts sums over all replicas after each forward, also of a draft.",
        "Leave --enable-eplb, --expert-distribution-recorder-mode and "
        "--enable-expert-distribution-metrics out.",
    ),
    Rule(
        "`--enable-dp-attention` with `--moe-runner-backend flashinfer_cutlass`",
        lambda f: (
            f.args.moe_runner_backend == "flashinfer_cutlass"
            and not f.args.disable_flashinfer_cutlass_moe_fp4_allgather
        ),
        "--moe-runner-backend flashinfer_cutlass can leave each rank a part of the hidden states.",
        "Add --disable-flashinfer-cutlass-moe-fp4-allgather, or give another backend.",
    ),
    Rule(
        "`--enable-dp-attention` with `--enforce-piecewise-cuda-graph`",
        lambda f: f.args.enforce_piecewise_cuda_graph,
        "--enforce-piecewise-cuda-graph does not work with --enable-dp-attention: each replica "
        "would choose by itself whether a prefill is a graph.",
        "Leave it out.",
    ),
)


@dataclass(frozen=True)
class LoadedFacts(Facts):
    """A server with DP attention, and its loaded target."""

    model: nn.Module


def _part_of_all(facts: LoadedFacts) -> str:
    """A part of the target that no replica has alone."""
    ranks, heads = facts.attention_tp, facts.target.num_attention_heads
    layers = (part for part in facts.model.modules() if isinstance(part, RadixAttention))
    if any(layer.tp_q_head_num * ranks < heads for layer in layers):
        return "attention"
    if getattr(token_embedding(facts.model), "tp_size", 1) not in (1, ranks):
        return "embedding"
    return "LM head" if getattr(lm_head(facts.model), "tp_size", 1) != ranks else ""


LOADED_RULES: tuple[Rule[LoadedFacts], ...] = (
    Rule(
        "`--enable-dp-attention`, targets whose class in SGLang gives a replica a part of its "
        "attention, embedding or LM head",
        _part_of_all,
        "SGLang's class of the target {f.args.model_path} does not divide its {found} among the "
        "ranks of each replica ({f.attention_tp}), so none can draft alone.",
        f"{WITHOUT_DP_ATTENTION} Or: {WITHOUT_DFLASH}",
    ),
)


def check_dp_attention(facts: DraftFacts) -> None:
    """Raise `Refusal` for what replicas that share a target's forward cannot serve exactly."""
    if facts.args.enable_dp_attention:
        refuse(RULES, facts)


def check_loaded_parts(server_args: Any, target: nn.Module) -> None:
    """Raise `Refusal` for a loaded target of which a replica has only a part."""
    if server_args.enable_dp_attention:
        refuse(LOADED_RULES, LoadedFacts(server_args, target))
