"""Refusals at startup: one paragraph, no traceback, and a status that is not 0."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from sglang.srt.managers import scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from sglang_dflash.engine import plugin
from sglang_dflash.engine.refusals import check_flags, longest_request
from sglang_dflash.errors import Refusal
from sglang_dflash.seam import release
from test.adapters import write_adapter
from test.arguments import arguments, launch, refused
from test.certificates import write_certificate
from test.checkpoints import draft_config, draft_weights, write_draft

FLAGS: dict[str, Any] = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_accept_threshold_single": 0.9,
    "speculative_accept_threshold_acc": 0.9,
    "speculative_token_map": "map.pt",
    "speculative_adaptive": True,
    "speculative_moe_a2a_backend": "deepep",
    "speculative_moe_runner_backend": "triton",
    "speculative_draft_attention_backend": "flashinfer",
    "speculative_dflash_block_size": 9,
    "speculative_num_draft_tokens": 1,
    "speculative_draft_window_size": 4,
    "max_total_tokens": 63,
    "attention_backend": "triton",
    "attn_cp_size": 2,
    "moe_a2a_backend": "deepep",
    "moe_dense_tp_size": 1,
    "enable_attn_tp_input_scattered": True,
    "enable_prefill_context_parallel": True,
    "pp_size": 2,
    "disaggregation_decode_enable_offload_kvcache": True,
    "kv_cache_dtype": "fp4_e2m1",
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "enable_mixed_chunk": True,
    "grpc_mode": True,
    "use_ray": True,
}


def from_command_line(*command: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(command))


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(target: str, draft: str, flag: str) -> None:
    """Each refusal names the flag or its wrong value, and the fix."""
    changes = {flag: FLAGS[flag]}
    if flag == "attn_cp_size":
        changes |= {"tp_size": 2, "moe_dp_size": 2}
    if flag.startswith("disaggregation"):
        changes |= {"disaggregation_mode": "decode"}
    with pytest.raises(Refusal) as caught:
        arguments(target, draft, **changes)
    message = str(caught.value)
    named = flag.replace("_", "-") in message or str(FLAGS[flag]) in message
    assert named, message
    assert "\n" not in message


@pytest.mark.parametrize("backend", ["none", "outlines", "llguidance"])
def test_strict_thinking_needs_xgrammar(target: str, draft: str, backend: str) -> None:
    """SGLang fails in its scheduler, at its start or at the first request."""
    flags: dict[str, Any] = {"grammar_backend": backend, "enable_strict_thinking": True}
    with pytest.raises(Refusal, match=f"--grammar-backend {backend}: .* xgrammar"):
        arguments(target, draft, reasoning_parser="deepseek-r1", **flags)


@pytest.mark.parametrize(
    "elsewhere", [{"tokenizer_worker_num": 2}, {"enable_http2": True}], ids=str
)
@pytest.mark.parametrize("key", ["api_key", "admin_api_key"])
def test_keys_that_nobody_would_check(
    target: str, draft: str, key: str, elsewhere: dict[str, Any]
) -> None:
    """SGLang gives its keys to the main process, and these flags serve HTTP in others."""
    with pytest.raises(Refusal, match=f"--{key.replace('_', '-')} would not be checked"):
        arguments(target, draft, **elsewhere, **{key: "secret"})
    assert arguments(target, draft, **elsewhere)
    assert arguments(target, draft, **{key: "secret"})


@pytest.mark.parametrize(
    "wrong", ["password", "no password", "key", "authorities", "refresh", "http2"]
)
def test_https_that_would_fail(target: str, draft: str, tmp_path: Path, wrong: str) -> None:
    """SGLang would load the target first, or ask for a password on the terminal."""
    key, certificate = map(str, write_certificate(tmp_path, "secret"))
    right = {"ssl_keyfile": key, "ssl_certfile": certificate, "ssl_keyfile_password": "secret"}
    assert arguments(target, draft, **right, ssl_ca_certs=certificate)
    changes: dict[str, Any] = {
        "password": {"ssl_keyfile_password": "other"},
        "no password": {"ssl_keyfile_password": None},
        "authorities": {"ssl_ca_certs": key},
        "refresh": {"enable_ssl_refresh": True},
        "http2": {"enable_http2": True},
    }
    if wrong == "key":
        (tmp_path / "other").mkdir()
        other, _ = write_certificate(tmp_path / "other", "secret")
        changes["key"] = {"ssl_keyfile": str(other)}
    named = {"refresh": "--enable-ssl-refresh", "http2": "--enable-http2"}
    with pytest.raises(Refusal, match=named.get(wrong, "--ssl-certfile")):
        arguments(target, draft, **(right | changes[wrong]))


def test_numactl_is_missing(
    target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's script would end with status 127, and the server with a traceback."""
    lscpu = shutil.which("lscpu")
    assert lscpu is not None
    (tmp_path / "lscpu").symlink_to(lscpu)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match="--numa-node"):
        arguments(target, draft, numa_node=[0])
    (tmp_path / "numactl").touch(mode=0o755)
    assert arguments(target, draft, numa_node=[0])


def test_detokenizers_of_one_tokenizer_worker(target: str, draft: str) -> None:
    """SGLang's router of detokenizers asserts that a request names its tokenizer worker."""
    with pytest.raises(Refusal, match="--detokenizer-worker-num 2 ends the server"):
        arguments(target, draft, detokenizer_worker_num=2)
    assert arguments(target, draft, detokenizer_worker_num=2, tokenizer_worker_num=2)
    assert arguments(target, draft, detokenizer_worker_num=2, skip_tokenizer_init=True)


def test_another_device(target: str, draft: str) -> None:
    """The first rule: the others read what a device serves."""
    served = arguments(target, draft)
    served.device = "xpu"
    with pytest.raises(Refusal, match=r"DFLASH does not run on xpu\. Serve on cuda or cpu"):
        check_flags(served)


@pytest.mark.parametrize("window", [0, -5])
def test_a_window_of_nothing(target: str, draft: str, window: int) -> None:
    """SGLang's own check ends in a traceback."""
    with pytest.raises(Refusal, match=f"--speculative-draft-window-size {window} is not possible"):
        arguments(target, draft, speculative_draft_window_size=window)


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-draft-model-path", "DRAFT"],
        ["--speculative-dflash-block-size", "8"],
        ["--speculative-dflash-verify-width", "auto"],
        ["--speculative-dflash-draft-ahead", "on"],
    ],
    ids=lambda given: given[0],
)
def test_flags_of_a_draft_without_the_algorithm(target: str, draft: str, given: list[str]) -> None:
    """SGLang would serve the target alone, and say nothing. The next command line is a new one."""
    command = [draft if part == "DRAFT" else part for part in given]
    with pytest.raises(Refusal, match=f"without --speculative-algorithm, but {given[0]} is given"):
        from_command_line("--model-path", target, *command)
    assert from_command_line("--model-path", target).speculative_algorithm is None


@pytest.mark.parametrize(("page", "needed"), [(1, 64), (256, 256)])
def test_a_pool_without_room_for_a_request(page: int, needed: int) -> None:
    """The pool is known before the start only if a flag gives it."""
    assert longest_request(needed, 8, page) == needed - 8
    with pytest.raises(Refusal, match=f"Give --max-total-tokens {needed} or more"):
        longest_request(needed - 1, 8, page)


def test_aliases_that_differ(target: str, draft: str) -> None:
    with pytest.raises(Refusal, match="aliases"):
        arguments(target, draft, speculative_num_draft_tokens=4, speculative_dflash_block_size=5)


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("flag", ["speculative_dflash_block_size", "speculative_num_draft_tokens"])
def test_block_size_flags_are_honoured(
    target: str, draft: str, size: int, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer masks than the trained 8 can cost acceptance, so there is a warning."""
    assert arguments(target, draft, **{flag: size}).speculative_num_draft_tokens == size
    assert ("trained for 8" in caplog.text) == (size < 8)


def test_block_size_comes_from_the_draft(target: str, draft: str) -> None:
    assert arguments(target, draft).speculative_num_draft_tokens == 8


MISFITS: dict[str, dict[str, Any]] = {
    "hidden size": {"hidden_size": 128},
    "layers": {"num_target_layers": 9},
    "target_layer_ids": {"num_target_layers": None, "dflash_config": {"target_layer_ids": [1, 7]}},
    "vocabulary": {"vocab_size": 9000},
    "mask_token_id": {"dflash_config": {"mask_token_id": 160}},
    "attention heads": {},
}


@pytest.mark.parametrize("words", MISFITS)
def test_misfits(target: str, tmp_path: Path, words: str) -> None:
    config = draft_config()
    weights = draft_weights(config)
    changed = draft_config(**MISFITS[words])
    path = write_draft(tmp_path, changed, weights)
    with pytest.raises(Refusal, match=words):
        arguments(target, str(path), tp_size=3 if words == "attention heads" else 1)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_are_strict(target: str, tmp_path: Path, change: str) -> None:
    config = draft_config()
    weights = draft_weights(config)
    if change == "missing":
        del weights["layers.1.self_attn.k_norm.weight"]
    else:
        weights["layers.0.self_attn.gate.weight"] = weights["norm.weight"].clone()
    path = write_draft(tmp_path, config, weights)
    with pytest.raises(Refusal, match=change + r" layers\."):
        arguments(target, str(path))


def test_a_block_that_does_not_fit_the_window(target: str, tmp_path: Path) -> None:
    config = draft_config(layer_types=["sliding_attention"] * 2, sliding_window=6)
    path = write_draft(tmp_path, config, draft_weights(config))
    with pytest.raises(Refusal, match="window of 6"):
        arguments(target, str(path))
    assert arguments(target, str(path), speculative_dflash_block_size=6)


def test_why_a_hook_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be imported is named, with the reason, and once."""
    gone = [name for name in HookRegistry._patched if ".TokenizerManager." in name]
    logits = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    assert len(gone) > 1
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {*gone, logits})
    module = "sglang.srt.managers.tokenizer_manager"
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvloop", None)  # so that it cannot be imported
    first, second = plugin.missing_parts()
    assert first == "no hook on layers.logits_processor.LogitsProcessor.forward"
    assert re.fullmatch(rf"{re.escape(module)} cannot be imported \(import of uvloop .*\)", second)


def test_no_module_holds_a_hooked_method() -> None:
    """So `hook.register` may keep SGLang from searching all modules for it."""
    methods = set()
    for target in HookRegistry._patched:
        owner, _, name = target.rpartition(".")
        if isinstance(resolve_name(owner), type):
            methods.add(id(inspect.unwrap(resolve_name(target))))
    assert len(methods) > 50
    for module in filter(None, list(sys.modules.values())):
        for name, value in list(vars(module).items()):
            assert id(value) not in methods, (module, name)


def test_what_a_scheduler_logs() -> None:
    """A refusal is one paragraph. Any other error has its traceback."""

    def logged(error: ValueError) -> str:
        try:
            raise error
        except ValueError:
            return str(scheduler.get_exception_traceback())

    assert logged(Refusal("It is so.", "Leave it out.")) == "sglang-dflash: It is so. Leave it out."
    assert "Traceback" in logged(ValueError("it is so"))


@pytest.mark.full
def test_a_refusal_after_loading(target: str, draft: str, tmp_path: Path) -> None:
    """A scheduler logs one paragraph, and its server ends. Which adapters exist is known late."""
    adapter = write_adapter(tmp_path / "head", Path(target), rank=2, vocabulary=("lm_head",))
    flags = ["--model-path", target, "--speculative-algorithm", "DFLASH", "--dtype", "float32"]
    flags += ["--speculative-draft-model-path", draft, "--max-total-tokens", "512"]
    result = launch(*flags, "--lora-paths", f"head={adapter}")
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if "sglang-dflash:" in line]
    assert len(said) == 1
    assert "lm_head" in said[0]
    assert "Give --lora-target-modules" in said[0]
    assert "Traceback" not in result.stderr
    assert "Uvicorn running" not in result.stdout + result.stderr


def test_no_draft(target: str) -> None:
    with pytest.raises(Refusal, match="--speculative-draft-model-path"):
        arguments(target, None)


def test_half_of_the_plugin_is_refused(target: str, draft: str) -> None:
    """Without its CPU part, the plugin refuses, and the built-in does not run in its place."""
    flags = ["--model-path", target, "--speculative-algorithm", "DFLASH"]
    flags += ["--speculative-draft-model-path", draft, "--device", "cpu"]
    line = refused(launch(*flags, SGLANG_PLUGINS="dflash", SGLANG_USE_CPU_ENGINE="1"))
    assert "the plugin dflash_cpu is not loaded" in line


def test_incomplete_hooks_refuse_dflash_alone(target: str, draft: str) -> None:
    """Without one function in SGLang, DFLASH is refused. Arguments without it still work."""
    code = f"""
import os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang.srt.speculative import dflash_utils
del dflash_utils.validate_dflash_request
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
ServerArgs(model_path={target!r})
print("plain is fine")
ServerArgs(model_path={target!r}, speculative_algorithm="dflash",
           speculative_draft_model_path={draft!r})
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert "plain is fine" in result.stdout, result.stderr
    assert "cannot serve DFLASH" in refused(result)


def test_another_sglang(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "installed", lambda: "0.5.14")
    with pytest.raises(
        Refusal, match=r"SGLang is 0\.5\.14, this release serves 0\.5\.13\.post1 and"
    ):
        arguments(target, draft)


def test_unsupported_target_class(draft: str, tmp_path: Path) -> None:
    """The refusal names a target class that returns no hidden states."""
    config = json.loads((Path(draft).parent / "target" / "config.json").read_text())
    config |= {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match="GPT2LMHeadModel"):
        arguments(str(tmp_path), draft)


def test_the_page_lists_what_is_refused() -> None:
    """`python docs/site/refusals.py` writes its tables."""
    generator = runpy.run_path(str(Path(__file__).parents[2] / "docs/site/refusals.py"))
    text = generator["PAGE"].read_text()
    assert generator["page"](text) == text
    assert "| `--speculative-adaptive` | it adapts EAGLE's steps |" in text
