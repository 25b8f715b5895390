"""Targets that cannot be served, or not with a draft. Modules of `targets` have their own rules."""

from __future__ import annotations

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from sglang_dflash.checkpoint.fit import Target, misfits
from sglang_dflash.errors import WITHOUT_DFLASH, Refusal, Rule
from sglang_dflash.settings.facts import DraftFacts
from sglang_dflash.targets.hybrid import keeps_gdn_states

WITHOUT_ADAPTERS = "Leave --enable-lora and --lora-paths out."


def target_class(target: ModelConfig) -> tuple[type, str]:
    """SGLang's class of the target, and its name."""
    from sglang.srt.models.registry import ModelRegistry  # imports every model

    found: tuple[type, str] = ModelRegistry.resolve_model_cls(target.hf_config.architectures)
    return found


def joined(found: list[Refusal]) -> Refusal | None:
    """All reasons, and each fix once."""
    reasons = " ".join(refusal.what for refusal in found)
    fixes = " ".join(dict.fromkeys(refusal.fix for refusal in found))
    return Refusal(reasons, fixes) if found else None


def _misfit(facts: DraftFacts) -> Refusal | None:
    text = facts.target.hf_text_config
    target = Target(
        path=facts.args.model_path,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )
    return joined(misfits(facts.draft, target))


def _unsplit_heads(facts: DraftFacts) -> str:
    ranks, draft = facts.attention_tp, facts.draft
    for kind, count in (("attention", draft.num_heads), ("KV", draft.num_kv_heads)):
        if count % ranks and ranks % count:
            return f"{count} {kind}"
    return ""


def has_windows(target: ModelConfig) -> bool:
    """Whether SGLang's class of the target reports a sliding window to its backend."""
    cls, _ = target_class(target)
    return bool(target.is_hybrid_swa or hasattr(cls, "get_attention_sliding_window_size"))


def _unshaped_class(facts: DraftFacts) -> str:
    """The class of a hybrid target that gives LoRA no shapes."""
    if not (facts.adapters and keeps_gdn_states(facts.target)):
        return ""
    cls, name = target_class(facts.target)
    return "" if hasattr(cls, "get_hidden_dim") else name


def _uncounted_experts(facts: DraftFacts) -> str:
    """Flags of experts, where SGLang would look for experts and fail."""
    cls, _ = target_class(facts.target)
    counted = hasattr(cls, "get_model_config_for_expert_location")
    routed = hasattr(facts.target.hf_text_config, "num_experts_per_tok")
    recorder = "expert_distribution_recorder_mode", "enable_expert_distribution_metrics"
    unserved = (() if counted else recorder) + (() if routed else ("enable_return_routed_experts",))
    given = ["--" + name.replace("_", "-") for name in unserved if getattr(facts.args, name)]
    return " and ".join(given)


def _captures_nothing(facts: DraftFacts) -> str:
    """The class of a target that returns no hidden states."""
    cls, name = target_class(facts.target)
    methods = (f"set_{method}_layers_to_capture" for method in ("dflash", "eagle3"))
    return "" if any(hasattr(cls, method) for method in methods) else name


FIT: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "a draft that was not trained for the target",
        _misfit,
        "The draft {f.draft.path} does not fit the target {f.args.model_path}: {found.what}",
        "{found.fix}",
    ),
    Rule(
        "`--tp` that does not divide the draft's heads",
        _unsplit_heads,
        "The draft's {found} heads cannot be split over {f.attention_tp} ranks of --tp "
        "{f.args.tp_size}.",
        "Give a --tp (with DP attention, --tp / --dp-size) that divides them.",
    ),
)
RULES: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "targets with sliding-window layers, with flashinfer",
        lambda f: f.verify == "flashinfer" and has_windows(f.target),
        "The target {f.args.model_path} has sliding-window layers, and SGLang's flashinfer backend "
        "cannot verify a block of them.",
        "Give --attention-backend fa3 or triton.",
    ),
    Rule(
        "LoRA adapters, targets with latent attention (MLA)",
        lambda f: f.adapters and f.target.attention_arch == AttentionArch.MLA,
        "The target {f.args.model_path} uses latent attention (MLA). SGLang's LoRA has kernels of "
        "its own for it, which have not been compared with DFLASH.",
        WITHOUT_ADAPTERS,
    ),
    Rule(
        "LoRA adapters, hybrid targets whose class gives no shapes",
        _unshaped_class,
        "The target {f.args.model_path} has linear attention, and SGLang's {found} does not give "
        "LoRA the shapes of its projections. LoRA guesses wrong ones for its queries.",
        WITHOUT_ADAPTERS,
    ),
    Rule(
        "quantised targets on a CPU",
        lambda f: not f.platform.quantised_weights and f.target.quantization is not None,
        "The target {f.args.model_path} is quantised ({f.target.quantization}), which is not "
        "served {f.platform.place}.",
        "Use its unquantised checkpoint.",
    ),
)
CLASS_RULES: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "flags of experts, targets without experts",
        _uncounted_experts,
        "{found} cannot be served: SGLang finds no experts in the target {f.args.model_path}.",
        "Leave it out.",
    ),
    Rule(
        "targets whose class in SGLang returns no hidden states",
        _captures_nothing,
        "The target class {found} returns no hidden states (it has neither "
        "set_dflash_layers_to_capture nor set_eagle3_layers_to_capture).",
        WITHOUT_DFLASH,
    ),
)
