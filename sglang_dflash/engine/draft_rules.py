"""Drafts that cannot be served, and flags that do not go with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.fit import defects
from sglang_dflash.checkpoint.served import draft_config
from sglang_dflash.engine.target_rules import joined
from sglang_dflash.errors import BUILT_IN, Refusal, Rule, refuse
from sglang_dflash.model.target_parts import lm_head
from sglang_dflash.seam import release
from sglang_dflash.settings.block_size import longest_block
from sglang_dflash.settings.facts import DraftFacts, Facts

PICKLED_FORMATS = ("pt", "npcache")
PLAIN = torch.float32, torch.float16, torch.bfloat16
NOT_RUN = "is for Blackwell GPUs, on which this package has not run"
# Attention backends of SGLang that verify no blocks here, and why. Other devices have others.
UNSERVED = {
    "trtllm_mla": NOT_RUN,
    "cutedsl_mla": NOT_RUN,
    "trtllm_mha": NOT_RUN,
    "tokenspeed_mla": "needs KV in FP8, which is not served for latent attention (MLA)",
    "cutlass_mla": "computes one token per request, and its CUDA graphs have no room for a block",
    "flashmla": "has a kernel for blocks that has not been compared with its kernel for one token",
    "fa4": "computes K and V of each head of MLA, for which a verify lacks lengths, and its other "
    "kernels have not been compared with this package",
    "dsa": "serves DeepSeek's sparse attention (DSA) only",
    "nsa": "serves DeepSeek's sparse attention (DSA) only",
}


def _defect(facts: DraftFacts) -> Refusal | None:
    width = facts.args.speculative_num_draft_tokens
    if release.has_own_scheduler_step():
        width = facts.draft.width_of(width)
    return joined(defects(facts.draft, facts.tensors, width))


def _has_no_weights(facts: DraftFacts) -> bool:
    return not facts.tensors.known and facts.args.speculative_draft_load_format != "dummy"


def _pickled_format(facts: DraftFacts) -> str:
    """A format with which SGLang would open pickles beside the draft's safetensors files."""
    asked: str = facts.args.speculative_draft_load_format or facts.args.load_format
    return asked if asked in PICKLED_FORMATS else ""


def _other_quantisation(facts: DraftFacts) -> str:
    """The draft's quantisation in words, if another one is asked for."""
    method, asked = facts.draft.quantization_method, facts.args.speculative_draft_model_quantization
    return "" if asked in (None, method, facts.args.quantization) else method or "unquantised"


def _unserved_windows(facts: DraftFacts) -> str:
    """The backends that compute the draft's windows, if its own does not."""
    able = facts.platform.sliding_drafts
    slides = any(view.window is not None for view in facts.draft.attention)
    unable = facts.args.speculative_draft_attention_backend not in able
    return " or ".join(able) if slides and unable else ""


def block_size(facts: DraftFacts) -> int:
    """The served block: an explicit flag, else the longest."""
    return next(iter(_block_sizes(facts)), longest_block(facts.draft))


class _Impossible(NamedTuple):
    size: int
    longest: int


def _impossible_block(facts: DraftFacts) -> _Impossible | None:
    size, longest = block_size(facts), longest_block(facts.draft)
    return None if 2 <= size <= longest else _Impossible(size, longest)


def _block_sizes(facts: DraftFacts) -> list[int]:
    """The sizes that two flags give, which are aliases."""
    given = facts.args.speculative_dflash_block_size, facts.args.speculative_num_draft_tokens
    return sorted({size for size in given if size is not None})


def draft_backend(facts: DraftFacts) -> str:
    """The attention backend of the draft: an explicit flag, else the target's."""
    return str(facts.args.speculative_draft_attention_backend or facts.decode)


def _unserved_backends(facts: DraftFacts) -> str:
    """The target's backends that verify no blocks, with the reasons that are known."""
    able = facts.platform.attention_backends
    unable = sorted({facts.prefill, facts.decode} - set(able))
    reasons = [f"{name} {UNSERVED[name]}" for name in unable if name in UNSERVED]
    return ", ".join(unable) + (": " if reasons else "") + "; ".join(reasons)


# Before the other rules, which know the block and the draft's attention backend.
FIRST: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "two different block sizes",
        lambda f: _block_sizes(f) if len(_block_sizes(f)) > 1 else None,
        "--speculative-dflash-block-size and --speculative-num-draft-tokens are aliases but "
        "differ: {found}.",
        "Give one of them.",
    ),
    Rule(
        "a block size other than 2 to the draft's",
        _impossible_block,
        "The block size {found.size} is not possible: a block of this draft has at most "
        "{found.longest}.",
        "Give 2 to {found.longest}. The anchor counts.",
    ),
    Rule(
        "`--speculative-draft-window-size` smaller than a block",
        lambda f: (
            block_size(f) > (f.args.speculative_draft_window_size or math.inf) and block_size(f)
        ),
        "A block of {found} does not fit --speculative-draft-window-size "
        "{f.args.speculative_draft_window_size}.",
        "Give at least {found}.",
    ),
    Rule(
        "`--attention-backend` other than triton, fa3, flashinfer on CUDA, torch_native on a CPU",
        _unserved_backends,
        "DFLASH verifies with the attention backends {f.attention_backends}, not {found}.",
        "Give --attention-backend {f.platform.attention_backends[0]}. " + BUILT_IN,
    ),
    Rule(
        "`--speculative-draft-attention-backend` other than these",
        lambda f: draft_backend(f) not in f.platform.attention_backends and draft_backend(f),
        "The draft is served with the attention backends {f.attention_backends}, not {found}.",
        "Give --speculative-draft-attention-backend {f.one_attention_backend}. " + BUILT_IN,
    ),
)
RULES: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "drafts with wrong weights, RoPE, head sizes, or windows smaller than a block",
        _defect,
        "The draft {f.draft.path} cannot be served: {found.what}",
        "{found.fix}",
    ),
    Rule(
        "drafts without weights",
        _has_no_weights,
        "The draft {f.draft.path} holds no safetensors file.",
        "Fetch the draft again.",
    ),
    Rule(
        "`--speculative-draft-load-format` pt, npcache",
        _pickled_format,
        "The load format {found} opens pickles in the draft {f.draft.path}, and these can run any "
        "code.",
        "Give --speculative-draft-load-format safetensors.",
    ),
    Rule(
        "quantised drafts on a CPU",
        lambda f: "" if f.platform.quantised_weights else f.draft.quantization_method,
        "The draft {f.draft.path} is quantised ({found}), which is not served {f.platform.place}.",
        "Use its unquantised checkpoint.",
    ),
    Rule(
        "`--speculative-draft-model-quantization` other than the draft's or the target's",
        _other_quantisation,
        "--speculative-draft-model-quantization {f.args.speculative_draft_model_quantization} does "
        "not work: the draft is {found} and is served as it is.",
        "Leave it out.",
    ),
    Rule(
        "drafts with sliding windows, with a backend that computes them causally",
        _unserved_windows,
        "The draft {f.draft.path} has sliding-window layers, and "
        "{f.args.speculative_draft_attention_backend} does not compute them correctly without "
        "causality.",
        "Give --speculative-draft-attention-backend {found}.",
    ),
)


@dataclass(frozen=True)
class HeadFacts(Facts):
    """A server of a loaded target, and its draft."""

    draft: DFlashConfig
    head: nn.Module  # the target's LM head


def _reads_other_rows(facts: HeadFacts) -> bool:
    weight = getattr(facts.head, "weight", None)
    packed = getattr(facts.head, "use_intel_amx_backend", False)  # SGLang reorders it on such CPUs
    plain = weight is not None and weight.dtype in PLAIN and not packed
    return facts.draft.family.reads_head and facts.draft.draft_vocab_size is None and not plain


LOADED_RULES: tuple[Rule[HeadFacts], ...] = (
    Rule(
        "DSpine drafts of targets whose LM head is quantised or packed",
        _reads_other_rows,
        "The draft {f.draft.path} cannot be served: it scores tokens by rows of the target's LM "
        "head, which is quantised or packed.",
        "Use a target with a plain LM head, or a draft of another family.",
    ),
)


def check_loaded_head(server_args: Any, target: nn.Module) -> None:
    """Raise `Refusal` for a draft that cannot read the target's LM head.

    target: the loaded model.
    """
    refuse(LOADED_RULES, HeadFacts(server_args, draft_config(server_args), lm_head(target)))
