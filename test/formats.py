"""Random small drafts, written as their publishers would, and how each is to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file

from test.checkpoints import (
    HIDDEN,
    INNER,
    LAYERS,
    MASK,
    STATE,
    VOCAB,
    convolution_weights,
    domino_weights,
    draft_config,
    draft_weights,
    head_weights,
    injection_weights,
    lilicorr_weights,
    selector_weights,
    speculators_draft,
    write_draft,
)
from test.reference import Correlated, Domino, Semantics

# Files beside model.safetensors. In the weights of a case, they are under their names.
MASK_FILE, CODES_FILE = "mask_embedding.pt", "transfer.safetensors"
SLIDING = ["sliding_attention", "full_attention"]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 50_000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
PLAIN = {"rope_theta": 10_000.0}
KIMI = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
GPT_OSS = YARN | {"truncate": False, "attention_factor": 0.5}
SHORT_YARN = YARN | {"original_max_position_embeddings": 8}


Case: TypeAlias = tuple[dict[str, Any], dict[str, Any], Semantics]  # config, weights, how to read


def zlab(**changes: Any) -> Case:
    config = draft_config(**changes)
    return config, draft_weights(config), Semantics.of_zlab(config)


def with_rope(parameters: dict[str, Any], how: str) -> Case:
    """The same RoPE in each of the places where publishers put it."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    config, weights, semantics = zlab()
    config["rope_theta"] = parameters["rope_theta"]
    if how == "rope_parameters":
        config |= {"rope_theta": None, "rope_parameters": parameters}
    elif how == "rope_scaling":
        config["rope_scaling"] = scaling
    elif how == "type":  # its older name
        config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return config, weights, replace(semantics, rope=[parameters] * 2)


def speculators(
    draft_vocab: int = VOCAB,
    own_embedding: bool = True,
    body: dict[str, Any] | None = None,
    **changes: Any,
) -> Case:
    config, weights = speculators_draft(draft_vocab, **(body or {}))
    if not own_embedding:
        del weights["embed_tokens.weight"]
    return config | changes, weights, Semantics.of_zlab(draft_config(), hidden_state_ids=[1, 3])


def sliding_speculators(non_causal: bool, window: int = 12) -> Case:
    body = {"layer_types": SLIDING, "sliding_window": window}
    changes = {"sliding_window_non_causal": True} if non_causal else {}
    config, weights, semantics = speculators(body=body, **changes)
    layers = [("speculators", window, not non_causal), ("full", None, False)]
    return config, weights, replace(semantics, layers=layers)


def sliding_zlab(window: int = 12, causal: bool | None = None, **changes: Any) -> Case:
    method = {} if causal is None else {"causal": causal}
    config, weights, semantics = zlab(
        layer_types=SLIDING, sliding_window=window, dflash_config=method, **changes
    )
    in_block = True if causal is None else causal
    full = ("full", None, bool(causal))
    return config, weights, replace(semantics, layers=[("zlab", window, in_block), full])


def per_type_rope() -> Case:
    other = {"rope_type": "default", "rope_theta": 500.0}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    config, weights, semantics = sliding_zlab()
    config |= {"rope_parameters": {"sliding_attention": other, "full_attention": plain}}
    return config, weights, replace(semantics, rope=[other, plain])


def biased() -> Case:
    config, weights, semantics = zlab(attention_bias=True)
    rng = torch.Generator().manual_seed(5)
    for name in [n for n in weights if "_proj.weight" in n and "self_attn" in n]:
        weights[name.replace("weight", "bias")] = torch.randn(len(weights[name]), generator=rng)
    return config, weights, semantics


def masked(as_dict: bool) -> Case:
    config, weights, semantics = zlab()
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6))
    weights[MASK_FILE] = {"mask_token_id": MASK, "embedding": vector} if as_dict else vector[None]
    return config, weights, replace(semantics, mask_embedding=vector)


def from_anchor(kind: str) -> Case:
    if kind == "zlab":
        config, weights, semantics = zlab(dflash_config={"sample_from_anchor": True})
    else:
        config, weights, semantics = speculators(sample_from_anchor=True)
    return config, weights, replace(semantics, sample_from_anchor=True)


def scaled() -> Case:
    config, weights, semantics = zlab(
        dflash_config={
            "input_embedding_scale": 3.5,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
        }
    )
    scales: dict[str, Any] = {"logit_multiplier": 0.5, "logit_cap": 20.0}
    return config, weights, replace(semantics, embedding_scale=3.5, **scales)


def prefixed() -> Case:
    config, weights, semantics = zlab()
    return config, {f"model.{k}": v for k, v in weights.items()}, semantics


def served_beyond(parameters: dict[str, Any]) -> Case:
    """The draft states 32 positions, the test serves 100 and more."""
    config, weights, semantics = with_rope(parameters, "rope_parameters")
    config["max_position_embeddings"] = 32
    return config, weights, replace(semantics, max_positions=32)


def specforge() -> Case:
    """What SpecForge writes: the fields of Transformers' Qwen3Config, all of them."""
    config, weights, semantics = zlab()
    config |= {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "dtype": "float32",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * 2,
        "mask_token_id": MASK,
        "max_window_layers": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
    }
    return config, weights, semantics


def jetspec() -> Case:
    """What JetSpec writes: all layers are causal in the block, by a key of its own."""
    config, weights, semantics = zlab(dflash_config={"causal_head": True})
    return config, weights, replace(semantics, layers=[("full", None, True)] * 2)


def nemo(causal: bool | None = None) -> Case:
    """What NeMo Automodel writes: its own class, and the target's config with fields of its own.

    With tables of RoPE, which are not its rotation: no loader reads them.
    """
    method = {} if causal is None else {"causal": causal}
    config, weights, semantics = zlab(
        architectures=["Qwen3DFlashDraftModel"],
        dtype="bfloat16",
        layer_types=["full_attention"] * 2,
        max_window_layers=2,
        num_experts=128,
        mlp_only_layers=[],
        use_sliding_window=False,
        dflash_config=method,
    )
    for prefix in ("", "model.", "model.layers.0.self_attn."):
        weights[f"{prefix}rotary_emb.inv_freq"] = torch.full([16], float("nan"))
    weights["layers.1.self_attn.rotary_emb.cos_cached"] = torch.zeros(512, 32)
    return config, weights, replace(semantics, layers=[("full", None, bool(causal))] * 2)


def window_switched_off() -> Case:
    """`use_sliding_window: false`: z-lab's sliding layers stay causal and see all context."""
    config, weights, semantics = sliding_zlab(use_sliding_window=False)
    return config, weights, replace(semantics, layers=[("full", None, True), ("full", None, False)])


def sliding_by_depth() -> Case:
    """No `layer_types`: Transformers' rule, sliding from layer `max_window_layers` on."""
    config, weights, semantics = zlab(
        use_sliding_window=True, sliding_window=12, max_window_layers=1
    )
    return config, weights, replace(semantics, layers=[("full", None, False), ("zlab", 12, True)])


def all_sliding() -> Case:
    """`use_swa` with a window of its own."""
    config, weights, semantics = zlab(dflash_config={"use_swa": True, "swa_window_size": 10})
    return config, weights, replace(semantics, layers=[("zlab", 10, True)] * 2)


def last_layer() -> Case:
    config, weights, semantics = zlab(dflash_config={"target_layer_ids": [1, 3]})
    return config, weights, replace(semantics, hidden_state_ids=[2, 4])


def speculators_last_layer() -> Case:
    config, weights, semantics = speculators(aux_hidden_state_layer_ids=[2, 4])
    return config, weights, replace(semantics, hidden_state_ids=[2, 4])


def default_ids() -> Case:
    """A draft of one layer that does not name its target layer, which is the middle one."""
    case = zlab(num_hidden_layers=1, dflash_config={"target_layer_ids": [LAYERS // 2]})
    del case[0]["dflash_config"]["target_layer_ids"]
    return case


def deepspec(kind: str, with_row: bool = True) -> Case:
    """What DeepSpec writes: all fields at the top level, and copies of the vocabulary's weights."""
    config, weights, semantics = zlab()
    config = {k: v for k, v in config.items() if k != "dflash_config"} | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": MASK,
        "target_layer_ids": [0, 2],
        "num_anchors": 16,
        "markov_rank": 16,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": with_row,
    }
    weights |= head_weights(kind, with_row=with_row)
    return config, weights, replace(semantics, markov=kind, sample_from_anchor=True)


def dspark_of_specforge(kind: str, from_anchor: bool) -> Case:
    """What SpecForge writes, its early exports with `logit_head.`; a field for the other layout."""
    config, weights, semantics = zlab(
        architectures=["DSparkDraftModel"],
        dflash_config={
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "markov_rank": 16,
            "markov_head_type": kind,
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
            "final_logit_softcapping": 4.0,
            "output_multiplier": 0.5,
        }
        | ({} if from_anchor else {"sample_from_anchor": False}),
    )
    weights |= {f"logit_head.{name}": w for name, w in head_weights(kind).items()}
    reading: dict[str, Any] = {"logit_multiplier": 0.5, "logit_cap": 4.0}
    return (
        config,
        weights,
        replace(semantics, markov=kind, sample_from_anchor=from_anchor, **reading),
    )


def dspark_of_speculators(kind: str, from_anchor: bool, draft_vocab: int = VOCAB) -> Case:
    """What speculators writes: its defaults are a head of rank 256 and a confidence head."""
    config, weights, semantics = speculators(
        draft_vocab=draft_vocab,
        speculators_model_type="dspark",
        architectures=["DSparkSpeculator"],
        markov_rank=16,
        markov_head_type=kind,
        sample_from_anchor=from_anchor,
    )
    weights |= head_weights(kind, columns=draft_vocab)
    return config, weights, replace(semantics, markov=kind, sample_from_anchor=from_anchor)


def larger_vocabulary() -> Case:
    """The draft's own LM head has 8 rows more than the target has tokens. They draft nothing."""
    config, weights, semantics = deepspec("vanilla")
    config["vocab_size"] = VOCAB + 8
    rng = torch.Generator().manual_seed(9)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        weights[name] = torch.cat([weights[name], 9 * torch.randn(8, 16, generator=rng)])
    weights["lm_head.weight"] = torch.randn(VOCAB + 8, HIDDEN, generator=rng)
    return config, weights, replace(semantics, columns=VOCAB)


def without_markov(confident: bool) -> Case:
    """DeepSpec's DFlash drafts: its own class, rank 0, and the anchor predicts."""
    config, weights, semantics = deepspec("vanilla", with_row=False)
    config |= {"markov_rank": 0, "enable_confidence_head": confident}
    dropped = "markov_head" if confident else ("markov_head", "confidence_head")
    weights = {k: v for k, v in weights.items() if not k.startswith(dropped)}
    return config, weights, replace(semantics, markov=None)


def domino(prefix: str = "", **stated: Any) -> Case:
    """What SpecForge writes. stated: fields that have defaults; prefix: of its early exports."""
    config, weights, semantics = zlab(
        architectures=["DominoDraftModel"],
        dflash_config={
            "projector_type": "domino",
            "emb_dim": INNER,
            "gru_hidden_dim": STATE,
        }
        | stated,
    )
    weights |= {prefix + name: w for name, w in domino_weights().items()}
    shifted, pure = stated.get("shift_label", False), stated.get("pure_draft_prefix_len", 0)
    return config, weights, replace(semantics, domino=Domino(shifted, pure))


def normalised_domino() -> Case:
    """What its normaliser writes, with fields at both places, and the logits' two factors."""
    config, weights, semantics = domino(shift_label=True, pure_draft_prefix_len=3)
    method = config["dflash_config"]
    config |= {
        "architectures": ["DFlashDraftModel"],
        "shift_label": True,
        "input_embedding_scale": 0.5,
    }
    config |= {name: method.pop(name) for name in ("emb_dim", "gru_hidden_dim")}
    config |= {"output_multiplier": 2.0, "final_logit_softcapping": 2.0}
    factors: dict[str, Any] = {"embedding_scale": 0.5, "logit_multiplier": 2.0, "logit_cap": 2.0}
    return config, weights, replace(semantics, **factors)


def masked_domino() -> Case:
    """The embedding of the mask is for the body alone. The GRU reads a drafted mask as a token."""
    config, weights, semantics = domino()
    _, masked_weights, with_mask = masked(False)
    weights[MASK_FILE] = masked_weights[MASK_FILE]
    return config, weights, replace(semantics, mask_embedding=with_mask.mask_embedding)


CONVOLUTION = {"conv_kernel_size": 3, "conv_group_size": 8}
SELECTOR = {"selector_rank": 16, "selector_top_k": 12}


def dflash2(
    convolved: bool = True, selected: bool = True, place: str = "dflash_config", **method: Any
) -> Case:
    """What z-lab writes. Its own class saves the codebooks with `.weight`."""
    fields = (CONVOLUTION if convolved else {}) | (SELECTOR if selected else {})
    changes = fields if place == "top" else {"dflash_config": fields | method}
    config, weights, semantics = zlab(architectures=["DFlash2DraftModel"], **changes)
    if convolved:
        weights |= convolution_weights(taps=3, group=8)
    if selected:
        weights |= selector_weights(suffix=".weight" if place == "top" else "")
    parts: dict[str, Any] = {
        "convolved": 8 if convolved else None,
        "candidates": 12 if selected else None,
    }
    return config, weights, replace(semantics, **parts)


def capped_dflash2() -> Case:
    config, weights, semantics = dflash2(final_logit_softcapping=4.0, output_multiplier=0.5)
    return config, weights, replace(semantics, logit_multiplier=0.5, logit_cap=4.0)


def padded_dflash2() -> Case:
    """The draft's vocabulary has 24 rows more than the target's."""
    config, weights, semantics = dflash2(convolved=False)
    config["vocab_size"] = VOCAB + 24
    return config, weights | selector_weights(rows=VOCAB + 24), semantics


def many_candidates() -> Case:
    """More than the second of two ranks has tokens."""
    config, weights, semantics = dflash2(convolved=False, selector_top_k=100)
    return config, weights, replace(semantics, candidates=100)


def published_dflash2() -> Case:
    """Every layer slides without causality, and the logits are capped."""
    config, weights, semantics = dflash2(final_logit_softcapping=6.0, input_embedding_scale=3.5)
    config |= {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 12,
        "use_sliding_window": True,
        "is_causal": False,
    }
    layers: list[tuple[str, int | None, bool]] = [("zlab", 12, False)] * 2
    return config, weights, replace(semantics, layers=layers, logit_cap=6.0, embedding_scale=3.5)


def dflash2_of_speculators(from_anchor: bool = False) -> Case:
    """What speculators writes: its defaults are 2 taps, groups of 16, and blocks not causal."""
    config, weights, semantics = speculators(
        own_embedding=False,
        # Without use_sliding_window, Transformers' Qwen3Config drops the window.
        body={"layer_types": SLIDING, "sliding_window": 12, "use_sliding_window": True},
        speculators_model_type="dflash2",
        architectures=["DFlash2DraftModel"],
        selector_rank=24,
        sample_from_anchor=from_anchor,
    )
    weights |= convolution_weights(taps=2, group=16) | selector_weights(rank=24)
    layers = [("speculators", 12, False), ("full", None, False)]
    parts: dict[str, Any] = {"convolved": 16, "candidates": 16, "sample_from_anchor": from_anchor}
    return config, weights, replace(semantics, layers=layers, **parts)


def dspine(top_k: int = 12, **changes: Any) -> Case:
    """What SpecForge writes, with the fields of training."""
    config, weights, semantics = zlab(
        architectures=["DSpineDraftModel"],
        auto_map={"AutoModel": "dspine.DSpineDraftModel"},
        is_causal=True,
        top_k=50,  # of Transformers' generation
        dspine_config={
            "transfer_rank": 24,
            "message_size": 20,
            "top_k": top_k,
            "ce_weight": 0.1,
            "alignment_warmup_steps": 146,
            "replacement_end_ratio": 1 / 3,
        },
        **changes,
    )
    weights |= injection_weights(rank=24, message=20)
    layers: list[tuple[str, int | None, bool]] = [("full", None, True)] * 2
    return config, weights, replace(semantics, layers=layers, refined=top_k)


def dspine_of_tencent() -> Case:
    """What Tencent's own training writes: 16 positions and candidates, and the codes beside."""
    config, weights, semantics = dspine(top_k=16)
    del (
        config["dspine_config"],
        config["architectures"],
        config["is_causal"],
        weights["transfer_ready"],
    )
    weights[CODES_FILE] = {"codes": weights.pop("transfer_codes")}
    return {"config": config}, weights, replace(semantics, block_size=16)


def sliding_dspine() -> Case:
    """A layer slides, the logits are capped, and the vocabulary has rows that pad."""
    config, weights, semantics = dspine(
        layer_types=SLIDING,
        sliding_window=12,
        dflash_config={"final_logit_softcapping": 4.0, "output_multiplier": 0.5},
    )
    config["vocab_size"] = VOCAB + 24
    weights |= {"transfer_codes": injection_weights(24, 20, rows=VOCAB + 24)["transfer_codes"]}
    layers: list[tuple[str, int | None, bool]] = [("zlab", 12, True), ("full", None, True)]
    parts: dict[str, Any] = {"logit_multiplier": 0.5, "logit_cap": 4.0}
    return config, weights, replace(semantics, layers=layers, **parts)


def lilicorr(size: int = 32, top_k: int = 8, **method: Any) -> Case:
    """What ModelOpt writes. A head as wide as the draft states size 0, and projects no tokens."""
    fields = {
        "projector_type": "lilicorr",
        "lilicorr_candidate_topk": top_k,
        "lilicorr_hidden_size": 0 if size == HIDDEN else size,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 4,
        "lilicorr_mlp_ratio": 3,
        "lilicorr_factor_dim": 12,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10.0,
    }
    config, weights, semantics = zlab(
        architectures=["LiLiCorrDraftModel"], dflash_config=fields | method
    )
    weights |= lilicorr_weights(size, top_k)
    return config, weights, replace(semantics, correlated=Correlated(top_k))


def convolved_lilicorr() -> Case:
    """The body has DFlash 2's convolutions, and the vocabulary has rows that pad."""
    config, weights, semantics = lilicorr(**CONVOLUTION)
    config["vocab_size"] = VOCAB + 24
    weights |= convolution_weights(taps=3, group=8)
    return config, weights, replace(semantics, convolved=8)


CASES: dict[str, Callable[[], Case]] = {
    "zlab": zlab,
    "zlab default target layer": default_ids,
    "zlab model. prefix": prefixed,
    "zlab sliding": sliding_zlab,
    "zlab sliding not causal": lambda: sliding_zlab(causal=False),
    "zlab causal": lambda: sliding_zlab(causal=True),
    "zlab window 8": lambda: sliding_zlab(window=8),
    "zlab attention bias": biased,
    "zlab mask embedding": lambda: masked(False),
    "zlab mask embedding in a dict": lambda: masked(True),
    "zlab sample_from_anchor": lambda: from_anchor("zlab"),
    "zlab scale, cap, multiplier": scaled,
    "zlab yarn": lambda: with_rope(YARN, "rope_scaling"),
    "zlab yarn by type": lambda: with_rope(YARN, "type"),
    "zlab yarn in rope_parameters": lambda: with_rope(YARN, "rope_parameters"),
    "zlab llama3": lambda: with_rope(LLAMA3, "rope_scaling"),
    "zlab linear": lambda: with_rope(LINEAR, "rope_parameters"),
    "zlab yarn of Kimi": lambda: with_rope(KIMI, "type"),
    "zlab yarn of gpt-oss": lambda: with_rope(GPT_OSS, "rope_scaling"),
    "zlab rope by layer type": per_type_rope,
    "zlab beyond its positions": lambda: served_beyond({"rope_type": "default"} | PLAIN),
    "zlab linear beyond its positions": lambda: served_beyond(LINEAR),
    "zlab yarn beyond its positions": lambda: served_beyond(SHORT_YARN),
    "zlab window switched off": window_switched_off,
    "zlab sliding by depth": sliding_by_depth,
    "zlab use_swa": all_sliding,
    "zlab last layer": last_layer,
    "SpecForge": specforge,
    "JetSpec": jetspec,
    "NeMo": nemo,
    "NeMo JetSpec": lambda: nemo(causal=True),
    "speculators": speculators,
    "speculators without embedding": lambda: speculators(own_embedding=False),
    "speculators draft vocabulary": lambda: speculators(draft_vocab=64),
    "speculators sample_from_anchor": lambda: from_anchor("speculators"),
    "speculators last layer": speculators_last_layer,
    "speculators sliding": lambda: sliding_speculators(non_causal=False),
    "speculators sliding not causal": lambda: sliding_speculators(non_causal=True),
    "DeepSpec vanilla": lambda: deepspec("vanilla"),
    "DeepSpec gated": lambda: deepspec("gated", with_row=False),
    "DeepSpec rnn": lambda: deepspec("rnn"),
    "DeepSpec larger vocabulary": larger_vocabulary,
    "DeepSpec DFlash": lambda: without_markov(confident=False),
    "DeepSpec DFlash with confidence": lambda: without_markov(confident=True),
    "SpecForge DSpark": lambda: dspark_of_specforge("vanilla", from_anchor=True),
    "SpecForge DSpark gated": lambda: dspark_of_specforge("gated", from_anchor=True),
    "SpecForge DSpark rnn fill-in": lambda: dspark_of_specforge("rnn", from_anchor=False),
    "speculators DSpark": lambda: dspark_of_speculators("vanilla", from_anchor=False),
    "speculators DSpark draft vocabulary": lambda: dspark_of_speculators("rnn", True, 64),
    "Domino": domino,
    "Domino shifted": lambda: domino(shift_label=True, pure_draft_prefix_len=0),
    "Domino shifted, pure 1": lambda: domino(shift_label=True, pure_draft_prefix_len=1),
    "Domino pure 3, logit_head.": lambda: domino("logit_head.", pure_draft_prefix_len=3),
    "Domino normalised": normalised_domino,
    "Domino mask embedding": masked_domino,
    "DFlash 2": dflash2,
    "DFlash 2 at the top level": lambda: dflash2(place="top"),
    "DFlash 2 convolutions": lambda: dflash2(selected=False),
    "DFlash 2 selector": lambda: dflash2(convolved=False),
    "DFlash 2 padded vocabulary": padded_dflash2,
    "DFlash 2 many candidates": many_candidates,
    "DFlash 2 cap, multiplier": capped_dflash2,
    "DFlash 2 sliding, cap, scale": published_dflash2,
    "speculators DFlash 2": dflash2_of_speculators,
    "speculators DFlash 2 from the anchor": lambda: dflash2_of_speculators(from_anchor=True),
    "DSpine": dspine,
    "DSpine of Tencent": dspine_of_tencent,
    "DSpine sliding, cap, padded vocabulary": sliding_dspine,
    "LiLiCorr": lilicorr,
    "LiLiCorr of the draft's width": lambda: lilicorr(size=HIDDEN, top_k=4),
    "LiLiCorr convolved, padded vocabulary": convolved_lilicorr,
}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    """Write the checkpoint of a case, of which some tensors are in files of their own."""
    extra = (MASK_FILE, CODES_FILE)
    path = write_draft(folder, config, {k: w for k, w in weights.items() if k not in extra})
    if CODES_FILE in weights:
        save_file(weights[CODES_FILE], path / CODES_FILE)
    if MASK_FILE in weights:
        torch.save(weights[MASK_FILE], path / MASK_FILE)
    return path


def by_own_names(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights of all files, without their publishers' prefixes."""
    codes = {f"transfer_{name}": w for name, w in weights.get(CODES_FILE, {}).items()}
    weights = {k: w for k, w in weights.items() if k not in (MASK_FILE, CODES_FILE)} | codes
    return {
        name.removeprefix("model.").removeprefix("logit_head."): w for name, w in weights.items()
    }
