"""What is served on SGLang 0.5.13.post1 and refused on 0.5.23, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.plugins import load_plugins
from torch import nn

from sglang_dflash.engine.v0_5_23 import rules
from sglang_dflash.errors import Refusal
from sglang_dflash.seam.resolving import Arguments
from sglang_dflash.settings.options import DRAFT_AHEAD, VERIFY_WIDTH
from sglang_dflash.targets.kv_dtype import check_loaded_kv
from sglang_dflash.tiny import DRAFT, TARGET
from test.checkpoints import write_draft, write_latent_pair
from test.formats import speculators
from training import hybrid

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402 - its functions have hooks now


def resolved(target: Path = TARGET, draft: Path = DRAFT, **given: Any) -> Arguments:
    """The arguments of a DFLASH server, resolved as its launch does it; raises `Refusal`."""
    server_args = ServerArgs(
        model_path=str(target),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(draft),
        **given,
    )
    server_args.resolve_once()
    return Arguments(server_args)


def refused(*args: Any, **given: Any) -> str:
    with pytest.raises(Refusal) as error:
        resolved(*args, **given)
    return str(error.value)


def test_what_is_set() -> None:
    served = resolved(dtype="float32")
    assert served.dflash.verify_widths == (16,)
    assert served.dflash.reserved_tokens == 32
    assert served.speculative_num_draft_tokens == 16
    assert served.speculative_draft_attention_backend == "torch_native"
    assert served.max_running_requests == 48
    assert not served.disable_overlap_schedule


def test_the_draft_has_the_targets_dtype(tmp_path: Path) -> None:
    """SGLang reads `auto` as each model's own: here float16 and bfloat16."""
    shutil.copytree(TARGET, tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float16"}))
    assert resolved(tmp_path / "target").dtype == "float16"
    assert resolved(tmp_path / "target", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("size", [2, 8])
def test_a_shorter_block(size: int) -> None:
    assert resolved(speculative_dflash_block_size=size).dflash.block_size == size


OTHER = {
    "speculative_draft_kv_cache_dtype": "bfloat16",
    "speculative_draft_sink_size": 4,
    "decoupled_spec_role": "drafter",
    "aux_hidden_state_capture": "last",
    "ple_offload_embedding": "pinned",
    "uno_lora_path": "adapter",
    "sidecar": "program",
    "kv_cache_dtype": "mxfp8",
}


@pytest.mark.parametrize("flag", rules.NEW_FLAGS + rules.OLD_FLAGS, ids=lambda flag: flag.name)
def test_flags(flag: Any) -> None:
    value = OTHER.get(flag.name, True if False in flag.served else 2)
    text = refused(**{flag.name: value})
    assert text.startswith(f"DFLASH does not work with {flag.flag}"), text


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [(VERIFY_WIDTH, "auto", "verifies whole blocks"), (DRAFT_AHEAD, "off", "launches each step")],
)
def test_options(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, names: str) -> None:
    monkeypatch.setenv(variable, value)
    assert names in refused()


def test_kv_in_fp8_that_the_loaded_target_asks_for(tmp_path: Path) -> None:
    """The flag stays `auto`: this SGLang says it only where the target's KV is allocated."""
    arguments = resolved(*write_latent_pair(tmp_path), dtype="float32")
    runner = SimpleNamespace(model=nn.Module(), dtype=torch.float32, kv_cache_dtype=torch.float32)
    check_loaded_kv(arguments, runner)
    runner.kv_cache_dtype = torch.float8_e4m3fn
    with pytest.raises(Refusal, match="whose KV is not served in FP8"):
        check_loaded_kv(arguments, runner)


def test_another_device() -> None:
    assert "DFLASH does not run on xpu" in refused(device="xpu")


def test_kv_that_a_cpu_does_not_keep() -> None:
    assert "Give --kv-cache-dtype fp8_e4m3." in refused(kv_cache_dtype="fp8_e5m2")


def test_grammars_of_a_thought_are_of_xgrammar() -> None:
    """--grammar-backend and the rules of every release."""
    text = refused(
        enable_strict_thinking=True, grammar_backend="outlines", reasoning_parser="qwen3"
    )
    assert "only the masks of xgrammar can filter the tokens of a thought" in text


def changed_draft(folder: Path, **changes: Any) -> Path:
    """The bundled draft with other fields of its method."""
    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_block_has_as_many_positions_as_the_draft_reads(tmp_path: Path) -> None:
    """Of a draft that predicts from the anchor, too, which has one draft more."""
    draft = changed_draft(tmp_path / "draft", sample_from_anchor=True)
    assert resolved(draft=draft).dflash.block_size == 16
    text = refused(draft=draft, speculative_num_draft_tokens=17)
    assert "The block size 17 is not possible: a block of this draft has at most 16." in text


def test_hybrid_targets(tmp_path: Path) -> None:
    target, draft = hybrid.assemble(tmp_path)
    assert "has layers with recurrent states" in refused(target, draft)


def test_flags_beside_a_speculators_draft_that_names_its_target(tmp_path: Path) -> None:
    """The draft is --model-path, and nothing says DFLASH before its config is read."""
    config, weights, _ = speculators()
    config["speculators_config"]["verifier"]["name_or_path"] = str(TARGET)
    draft = write_draft(tmp_path / "draft", config, weights)
    with pytest.raises(Refusal, match="does not work with --sidecar"):
        ServerArgs(model_path=str(draft), sidecar="program").resolve_once()
