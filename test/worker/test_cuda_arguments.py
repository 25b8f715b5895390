"""The arguments of a CUDA server, as far as a CPU can check them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from sglang_dflash.backends.fa3 import share_schedules
from sglang_dflash.engine import target_rules
from sglang_dflash.errors import Refusal
from sglang_dflash.settings.options import DRAFT_AHEAD, Options
from sglang_dflash.targets import kv_dtype as target_kv
from test.arguments import arguments
from test.checkpoints import prompt
from test.inprocess import InProcess
from test.targets import HEADS, SIZES, save_config


def changed_target(target: str, folder: Path, **changes: object) -> str:
    """A copy of a target with changes in its config."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def test_a_draft_computes_in_the_targets_dtype(target: str, draft: str, tmp_path: Path) -> None:
    """With a half-precision target and `--dtype auto`, the draft reads half-precision states."""
    half = changed_target(target, tmp_path / "half", torch_dtype="float16", dtype="float16")
    with InProcess(half, draft, dtype="auto") as engine:
        runner = engine.worker.draft_model_runner
        assert runner.dtype == runner.kv_cache_dtype == torch.float16
        assert len(engine.generate(prompt(1, 20), max_new_tokens=20, ignore_eos=True)) == 20


@pytest.mark.parametrize(("device", "ahead"), [("cuda", True), ("cpu", False)])
def test_drafting_ahead_where_it_gains(
    monkeypatch: pytest.MonkeyPatch, device: str, ahead: bool
) -> None:
    monkeypatch.delenv(DRAFT_AHEAD, raising=False)
    args = SimpleNamespace(device=device, speculative_num_draft_tokens=8, enable_dp_attention=False)
    assert Options.read(args).draft_ahead is ahead


def model_config(target: str) -> ModelConfig:
    return ServerArgs(model_path=target).get_model_config()


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_kv_in_fp8_by_checkpoint(target: str, draft: str, tmp_path: Path, place: str) -> None:
    """SGLang reads from a ModelOpt checkpoint that KV is in FP8, unless no weight is quantised."""
    quantised = modelopt(target, tmp_path / "fp8", place, quant_algo="FP8")
    assert target_kv._has_fp8_kv(model_config(quantised))
    with pytest.raises(Refusal, match=r"quantised \(modelopt_fp8\)"):  # this machine is a CPU
        arguments(quantised, draft)
    if place == "hf_quant_config.json":
        kept = modelopt(target, tmp_path / "kept", place, quant_algo=None)
        assert not target_kv._has_fp8_kv(model_config(kept))
        assert arguments(kept, draft).kv_cache_dtype == "auto"


def modelopt(target: str, folder: Path, place: str, quant_algo: str | None) -> str:
    """A copy of a target that says what ModelOpt would, in one of two files."""
    if place == "config.json":
        scheme = {"type": "float", "num_bits": 8}
        said = {"quant_method": "modelopt", "quant_algo": quant_algo, "kv_cache_scheme": scheme}
        return changed_target(target, folder, quantization_config=said)
    nested = {"quantization": {"quant_algo": quant_algo, "kv_cache_quant_algo": "FP8"}}
    changed_target(target, folder)
    (folder / place).write_text(json.dumps(nested))
    return str(folder)


def test_targets_with_windows_are_known(tmp_path: Path) -> None:
    """SGLang's flashinfer backend cannot verify a block of such targets."""
    sizes = SIZES | HEADS | {"query_pre_attn_scalar": 32, "sliding_window": 32}
    config = transformers.Gemma3TextConfig(**sizes)
    windowed = model_config(save_config(tmp_path / "gemma", "Gemma3ForCausalLM", config))
    config = transformers.Qwen3Config(**SIZES, **HEADS)
    plain = model_config(save_config(tmp_path / "qwen", "Qwen3ForCausalLM", config))
    assert target_rules.has_windows(windowed)
    assert not target_rules.has_windows(plain)


@pytest.mark.parametrize("mla", [True, False])
def test_attention_in_a_latent_space_has_no_schedule(mla: bool) -> None:
    """SGLang's call for it, with the same names, has a second query and no window."""
    lens: Any = torch.zeros(1, dtype=torch.int32)
    lens.dflash_schedules = {}
    names = "q k_cache v_cache page_table cu_seqlens_q max_seqlen_q softmax_scale causal softcap"
    given = dict.fromkeys(names.split()) | {"cache_seqlens": lens, "num_splits": 0}
    if mla:
        given |= {"qv": torch.zeros(1, 2, 512), "return_softmax_lse": False}
    else:
        given |= {"window_size": (128, 0), "causal": True}
    assert share_schedules(lambda **passed: passed, **given) == given
