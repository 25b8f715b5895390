"""Targets that cannot be served exactly are refused by name, from their config only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.configs as configs
import torch
import transformers
from torch import nn

from sglang_dflash.engine.draft_rules import check_loaded_head
from sglang_dflash.errors import Refusal
from test.arguments import arguments
from test.checkpoints import HIDDEN, LAYERS, VOCAB
from test.formats import CASES, write
from test.targets import save_config

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LATENT = {
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
}
KDA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
RECURRENT: dict[str, Any] = {
    "FalconH1ForCausalLM": lambda: configs.FalconH1Config(**SIZES, mamba_d_ssm=128, **MAMBA),
    "NemotronHForCausalLM": lambda: configs.NemotronHConfig(
        **SIZES, hybrid_override_pattern="M*M*"
    ),
    "KimiLinearForCausalLM": lambda: configs.KimiLinearConfig(
        **SIZES, **LATENT, linear_attn_config=KDA
    ),
    "Lfm2ForCausalLM": lambda: transformers.Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"] * 2
    ),
    "GraniteMoeHybridForCausalLM": lambda: configs.GraniteMoeHybridConfig(
        **SIZES, **MAMBA, layer_types=["mamba", "attention"] * 2
    ),
}


@pytest.mark.parametrize("radix", [True, False], ids=["radix cache", "no radix cache"])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_state(draft: str, tmp_path: Path, architecture: str, radix: bool) -> None:
    """SGLang cannot restore the states of these classes."""
    target = save_config(tmp_path, architecture, RECURRENT[architecture]())
    with pytest.raises(Refusal, match="recurrent state"):
        arguments(target, draft, disable_radix_cache=not radix)


@pytest.mark.parametrize("flag", ["linear_attn_backend", "linear_attn_decode_backend"])
def test_another_kernel_of_gated_delta_networks(draft: str, tmp_path: Path, flag: str) -> None:
    target = save_config(tmp_path, "Qwen3NextForCausalLM", configs.Qwen3NextConfig(**SIZES))
    with pytest.raises(Refusal, match=flag.replace("_", "-")):
        arguments(target, draft, **{flag: "flashinfer"})


def test_a_hybrid_without_state_is_not_called_recurrent(draft: str, tmp_path: Path) -> None:
    """Granite 4's class with attention layers only is refused for its missing hook."""
    config = configs.GraniteMoeHybridConfig(**SIZES, **MAMBA, layer_types=["attention"] * LAYERS)
    with pytest.raises(Refusal, match="returns no hidden states"):
        arguments(save_config(tmp_path, "GraniteMoeHybridForCausalLM", config), draft)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"enable_lora": True}, "LoRA.*Leave --enable-lora"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "FP8.*Give --kv-cache-dtype bfloat16"),
    ],
    ids=str,
)
def test_latent_attention(draft: str, tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    sizes = SIZES | LATENT | {"num_key_value_heads": 4, "head_dim": 48}
    target = save_config(tmp_path, "DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**sizes))
    arguments(target, draft)
    with pytest.raises(Refusal, match=rf"(?s)MLA.*{words}"):
        arguments(target, draft, **flags)


QUANTISED = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_targets_on_a_cpu(target: str, draft: str, tmp_path: Path, method: str) -> None:
    config = json.loads((Path(target) / "config.json").read_text())
    config["quantization_config"] = QUANTISED[method]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=method):
        arguments(str(tmp_path), draft)


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_drafts_on_a_cpu(target: str, draft: str, tmp_path: Path, method: str) -> None:
    config = json.loads((Path(draft) / "config.json").read_text())
    config["quantization_config"] = QUANTISED[method]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((Path(draft) / "model.safetensors").read_bytes())
    with pytest.raises(Refusal, match=method):
        arguments(target, str(tmp_path))


@pytest.mark.parametrize("family", ["DSpine", "DFlash 2"])
def test_drafts_that_read_a_quantised_head(target: str, tmp_path: Path, family: str) -> None:
    """Rows are not tokens': int8, no weight at all as in AWQ, or packed for AMX."""
    drafts = arguments(target, str(write(tmp_path, *CASES[family]()[:2])))
    model, head = nn.Module(), nn.Module()
    model.lm_head = head
    head.weight = nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    check_loaded_head(drafts, model)
    int8 = nn.Parameter(torch.zeros(VOCAB, HIDDEN, dtype=torch.int8), requires_grad=False)
    for weight, packed in ((int8, False), (None, False), (head.weight, True)):
        head = nn.Module()
        head.register_parameter("weight", weight)
        vars(head)["use_intel_amx_backend"] = packed
        model.lm_head = head
        if family == "DFlash 2":
            check_loaded_head(drafts, model)
            continue
        with pytest.raises(Refusal, match="LM head, which is quantised or packed"):
            check_loaded_head(drafts, model)


def test_a_target_that_does_not_exist(draft: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="There is no target"):
        arguments(str(tmp_path / "nowhere"), draft)
