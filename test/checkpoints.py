"""Random small checkpoints, written by hand, independently of the package's adapters."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dflash.tiny import TARGET
from training.hybrid import COPIED

VOCAB, HIDDEN, LAYERS, BLOCK, MASK = 160, 64, 4, 8, 150
EOS = 3
STATE, INNER = 24, 16  # of Domino's GRU and its correction


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids that are neither EOS nor the mask."""
    return random.Random(seed).choices(range(5, 140), k=length)


def write_target(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A Qwen3 with weights large enough that its greedy text is not constant."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "rope_theta": 10_000.0,
        "bos_token_id": None,
        "eos_token_id": EOS,
    } | changes
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    model.save_pretrained(path)
    write_tokenizer(path, config["vocab_size"])
    return path


def word(token: int) -> str:
    """The text of a token of `write_tokenizer`."""
    return f"t{token:03d}"


def write_tokenizer(path: Path, vocab_size: int, special: dict[int, str] | None = None) -> None:
    """A tokenizer in which each word is one token. special: the texts of its special tokens."""
    texts = {i: word(i) for i in range(vocab_size)} | (special or {})
    tokenizer = Tokenizer(WordLevel({text: i for i, text in texts.items()}, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=word(EOS),
        pad_token=word(0),
        additional_special_tokens=list((special or {}).values()),
    ).save_pretrained(path)


def write_with_added_tokens(path: Path, words: Sequence[str], unnamed: int = 0) -> Path:
    """The bundled target with these tokens, and then `unnamed` ids without text, at its end.

    Its tokenizer loses as many merges, one for each id. The draft fits as it did.
    """
    path.mkdir()
    for file in TARGET.iterdir():
        if file.name != "tokenizer.json":
            (path / file.name).symlink_to(file)
    tokenizer = json.loads((TARGET / "tokenizer.json").read_text())
    model = tokenizer["model"]
    kept = len(model["vocab"]) - len(words) - unnamed
    model["merges"] = model["merges"][: kept - len(model["vocab"])]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if i < kept}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for i, text in enumerate(words):
        tokenizer["added_tokens"].append({"id": kept + i, "content": text, **flags})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def write_latent_pair(folder: Path, head_dim: int = 32, **changes: Any) -> tuple[Path, Path]:
    """folder/target, a random DeepSeek V3 with the bundled tokenizer, and folder/draft.

    It has experts, and YaRN. The draft is random, too, so few of its tokens are right. head_dim:
    the draft's; `changes` are of the target's config.
    """
    torch.manual_seed(0)
    config = json.loads((TARGET / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    sizes = {
        "vocab_size": config["vocab_size"],
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "kv_lora_rank": 32,
        "q_lora_rank": 40,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "rope_parameters": rope | {"rope_theta": 10_000.0},
    } | changes
    target = folder / "target"
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)).save_pretrained(target)
    file = target / "config.json"
    unsaved = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    file.write_text(json.dumps(json.loads(file.read_text()) | unsaved))
    for name in COPIED:
        shutil.copyfile(TARGET / name, target / name)
    method = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
    shared = {"vocab_size": config["vocab_size"], "max_position_embeddings": 2048}
    drafts = draft_config(**shared, head_dim=head_dim, dflash_config=method)
    return target, write_draft(folder / "draft", drafts, draft_weights(drafts))


def draft_config(**changes: Any) -> dict[str, Any]:
    """z-lab config.json for that target."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    }
    method = config["dflash_config"] | changes.pop("dflash_config", {})
    return config | changes | {"dflash_config": method}


def draft_weights(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights under the names that z-lab publishes."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int) -> Tensor:
        values: Tensor = torch.randn(out, into, generator=rng) * 1.5 / into**0.5
        return values

    def scale(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=rng)

    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    features = len(config["dflash_config"]["target_layer_ids"]) * hidden
    weights = {
        "fc.weight": matrix(hidden, features),
        "hidden_norm.weight": scale(hidden),
        "norm.weight": scale(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": scale(hidden),
            "post_attention_layernorm.weight": scale(hidden),
            "self_attn.q_proj.weight": matrix(heads * dim, hidden),
            "self_attn.k_proj.weight": matrix(kv_heads * dim, hidden),
            "self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
            "self_attn.o_proj.weight": matrix(hidden, heads * dim),
            "self_attn.q_norm.weight": scale(dim),
            "self_attn.k_norm.weight": scale(dim),
            "mlp.gate_proj.weight": matrix(config["intermediate_size"], hidden),
            "mlp.up_proj.weight": matrix(config["intermediate_size"], hidden),
            "mlp.down_proj.weight": matrix(hidden, config["intermediate_size"]),
        }
        weights |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return weights


def head_weights(
    kind: str, rank: int = 16, columns: int = VOCAB, with_row: bool = True, seed: int = 4
) -> dict[str, Tensor]:
    """Random weights of a DSpark draft's heads, large enough to change most drafts."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values: Tensor = torch.randn(*shape, generator=rng) / shape[-1] ** 0.5
        return values

    weights = {
        "markov_head.markov_w1.weight": 3 * rank**0.5 * drawn(VOCAB, rank),
        "markov_head.markov_w2.weight": 3 * drawn(columns, rank),
        "confidence_head.proj.weight": drawn(1, HIDDEN + rank * with_row),
        "confidence_head.proj.bias": drawn(1),
    }
    if kind == "gated":
        weights["markov_head.gate_proj.weight"] = 3 * drawn(rank, HIDDEN + rank)
        weights["markov_head.gate_proj.bias"] = drawn(rank)
    if kind == "rnn":
        weights["markov_head.joint_proj.weight"] = 3 * drawn(3 * rank, 2 * rank + HIDDEN)
        weights["markov_head.joint_proj.bias"] = drawn(3 * rank)
    return weights


def domino_weights(seed: int = 7) -> dict[str, Tensor]:
    """Random weights of Domino's GRU and its correction, large enough to change most drafts."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values: Tensor = torch.randn(*shape, generator=rng) / shape[-1] ** 0.5
        return values

    of_hidden, of_state = drawn(INNER, HIDDEN), 8 * drawn(INNER, STATE)
    return {
        "prefix_gru.weight_ih_l0": 8 * drawn(3 * STATE, HIDDEN),
        "prefix_gru.weight_hh_l0": 4 * drawn(3 * STATE, STATE),
        "embed_proj.0.weight": torch.cat([of_hidden, of_state], dim=1),
        "embed_proj.2.weight": 3 * drawn(VOCAB, INNER),
    }


def convolution_weights(taps: int, group: int, layers: int = 2, seed: int = 7) -> dict[str, Tensor]:
    """Random convolutions of a DFlash 2 draft. They keep the most of what they read."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            base = 0.4 * torch.randn(2, taps, HIDDEN, generator=rng)
            base[:, 0] += 1
            rows = 2 * taps * HIDDEN // group
            projection = 0.3 * torch.randn(rows, HIDDEN, generator=rng) / HIDDEN**0.5
            weights[f"layers.{layer}.{name}.base_kernel"] = base
            weights[f"layers.{layer}.{name}.kernel_projection.weight"] = projection
    return weights


def selector_weights(
    rank: int = 16, suffix: str = "", rows: int = VOCAB, seed: int = 8
) -> dict[str, Tensor]:
    """Random weights of a DFlash 2 draft's selector, large enough to change most drafts."""
    rng = torch.Generator().manual_seed(seed)
    prefix = "candidate_selector."
    return {
        f"{prefix}predecessor_codebook{suffix}": 2 * torch.randn(rows, rank, generator=rng),
        f"{prefix}successor_codebook{suffix}": torch.randn(rows, rank, generator=rng) / rank**0.5,
        f"{prefix}hidden_projection.weight": torch.randn(rank, HIDDEN, generator=rng) / HIDDEN**0.5,
    }


def lilicorr_weights(
    size: int = 32,
    top_k: int = 8,
    width: int = 8,
    layers: int = 2,
    factors: int = 12,
    seed: int = 10,
) -> dict[str, Tensor]:
    """Random weights of a LiLiCorr head of 4 heads, large enough to change most drafts."""
    rng = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def draw(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        values: Tensor = mean + scale * torch.randn(*shape, generator=rng)
        weights[f"lilicorr.{name}"] = values

    def linear(name: str, outputs: int, inputs: int) -> None:
        draw(f"{name}.weight", outputs, inputs, scale=inputs**-0.5)
        draw(f"{name}.bias", outputs, scale=0.3)

    if size != HIDDEN:
        linear("token_proj", size, HIDDEN)
    for name in ("pass_hidden_proj", "context_proj"):
        linear(name, size, HIDDEN)
    draw("feature_norm.weight", 5, scale=0.1, mean=1.0)
    draw("feature_norm.bias", 5, scale=0.1)
    linear("feature_mlp.up_proj", size, 5)
    linear("feature_mlp.down_proj", size, size)
    draw("slot_embedding", 1, 1, width - 1, 1, size)
    draw("rank_embedding", 1, 1, 1, top_k, size)
    draw("relative_slot_bias", 4, 2 * width - 1)
    draw("same_slot_bias", 4)
    for layer in range(layers):
        prefix = f"layers.{layer}."
        draw(f"{prefix}attn.in_proj_weight", 3 * size, size, scale=2 * size**-0.5)
        draw(f"{prefix}attn.in_proj_bias", 3 * size, scale=0.3)
        linear(f"{prefix}attn.out_proj", size, size)
        linear(f"{prefix}mlp.up_proj", 3 * size, size)
        linear(f"{prefix}mlp.down_proj", size, 3 * size)
        for name in ("attn_norm", "mlp_norm"):
            draw(f"{prefix}{name}.weight", size, scale=0.1, mean=1.0)
    for name in ("output_norm", "anchor_norm"):
        draw(f"{name}.weight", size, scale=0.1, mean=1.0)
    linear("factor_input_proj", size, 3 * size)
    for name in ("out_head", "in_head", "anchor_out_head"):
        linear(name, factors, size)
    return weights


def injection_weights(
    rank: int, message: int, layers: int = 2, rows: int = VOCAB, seed: int = 9
) -> dict[str, Tensor]:
    """Random weights of a DSpine draft's injection, large enough to change most drafts."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(outputs: int, inputs: int) -> Tensor:
        values: Tensor = torch.randn(outputs, inputs, generator=rng) / inputs**0.5
        return values

    codes = drawn(rows, rank)
    weights = {
        "injection.message.weight": drawn(message, rank),
        "injection.receiver_gate.weight": drawn(message, rank),
        "injection.predecessor_gate.weight": drawn(message, rank),
        "injection.bias": drawn(1, message)[0],
        "transfer_codes": codes / codes.norm(dim=1, keepdim=True),
        "transfer_ready": torch.tensor(True),
    }
    for layer in range(layers):
        weights[f"injection.readouts.{layer}.weight"] = drawn(rank, HIDDEN)
        weights[f"injection.writes.{layer}.weight"] = 2 * drawn(HIDDEN, message)
    return weights


def write_draft(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def speculators_draft(
    draft_vocab: int = 64, **body_changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Nested config and extra tensors of the speculators library, for that target.

    If `draft_vocab` is VOCAB, the draft has the target's own vocabulary.
    """
    flat = draft_config()
    keys: tuple[str, ...]
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "attention_bias", "rms_norm_eps")
    body = {k: flat[k] for k in (*keys, "max_position_embeddings", "vocab_size")}
    body |= {"model_type": "qwen3", "rope_parameters": {"rope_theta": 10_000.0}}
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": body | body_changes,
        "draft_vocab_size": draft_vocab,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "TARGET", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    weights = draft_weights(flat)
    rng = torch.Generator().manual_seed(3)
    weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=rng)
    if draft_vocab != VOCAB:
        chosen = torch.randperm(VOCAB, generator=rng)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter_(0, chosen, True)
        weights["lm_head.weight"] = torch.randn(draft_vocab, HIDDEN, generator=rng)
    return config, weights
