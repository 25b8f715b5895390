"""Start a server with flags that no other test gives, ask it, and end it.

`python -m test.try_flags` tries all, `python -m test.try_flags metrics http` some. Each server of
the bundled pair answers one chat, one stream of each API and one request with a grammar, and its
tokens are those of a server without these flags, or of plain SGLang with them if they change the
answers. docs/flags.csv has the results. "traces" and "fast tokens" need the packages of SGLang's
extras `tracing` and `fastokens`, and "numa" needs the command numactl.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from sglang.srt.utils.model_file_verifier import generate_checksums

from sglang_dflash.tiny import TARGET
from sglang_dflash.tiny.prompts import held_out
from test.certificates import write_certificate
from test.chaos.deaths import doomed
from test.chaos.disturb import processes
from test.checkpoints import write_with_added_tokens
from test.plugins import distribution
from test.servers import Client, chat

PROMPT = held_out("word", 1, seed=61)[0].prompt
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENDS_IN = 60  # seconds; processes that serve HTTP wait for each other
FOLDER = Path(tempfile.gettempdir(), f"sglang-dflash-flags-{os.getuid()}")

NAMED = FOLDER / "named"  # the target with two chat templates
THINKER = FOLDER / "thinker"
COPY = FOLDER / "copy"  # of the target
KEY, CERTIFICATE = FOLDER / "key.pem", FOLDER / "certificate.pem"
CHECKSUMS = FOLDER / "checksums.json"
# What users write themselves: a radix cache, a warm-up, a hook.
USERS = """
    def plugin():
        from sglang.srt.entrypoints.warmup import warmup
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        @warmup("users")
        async def ask(mode, tokenizer_manager):
            request = GenerateReqInput(text="Paul has", sampling_params={"max_new_tokens": 8})
            async for _ in tokenizer_manager.generate_request(request, None):
                pass

        register_radix_cache_backend("users", lambda context: RadixCache(context.params))

    def scaled(config):
        return lambda module, inputs, output: output * config["by"]
"""
HOOK = {
    "name": "scaled",
    "target_modules": ["model.layers.*.mlp"],
    "hook_factory": "users:scaled",
    "config": {"by": -1.0},
}

LABELS = ("--tokenizer-metrics-allowed-custom-labels", "team")
SECONDS = ("0.1", "1", "10")
# By name: flags that one server can have together.
TRIED: dict[str, tuple[str, ...]] = {
    "log": (
        *("--log-level", "debug", "--log-level-http", "warning"),
        *("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"),
        *("--log-requests-target", "stdout", str(FOLDER / "requests")),
        *("--uvicorn-access-log-exclude-prefixes", "/health"),
        *("--enable-request-time-stats-logging", "--show-time-cost", "--decode-log-interval", "2"),
        *("--gc-warning-threshold-secs", "0.5", "--gc-threshold", "700", "10", "10"),
        *("--crash-dump-folder", str(FOLDER / "crashes"), "--soft-watchdog-timeout", "100"),
        *("--watchdog-timeout", "200", "--dist-timeout", "300"),
    ),
    "metrics": (
        *("--enable-metrics", "--enable-metrics-for-all-schedulers", "--enable-mfu-metrics"),
        *("--tokenizer-metrics-custom-labels-header", "x-labels", *LABELS),
        *("--extra-metric-labels", '{"place": "here"}', "--collect-tokens-histogram"),
        *("--bucket-time-to-first-token", *SECONDS, "--bucket-inter-token-latency", *SECONDS),
        *("--bucket-e2e-request-latency", *SECONDS, "--prompt-tokens-buckets", "default"),
        *("--generation-tokens-buckets", "tse", "100", "2", "4"),
        *("--export-metrics-to-file", "--export-metrics-to-file-dir", str(FOLDER / "metrics")),
        *("--load-snapshot-publish-interval", "1", "--metrics-host", "127.0.0.1"),
        *("--metrics-port", "0", "--enable-cache-report"),
        *("--grpc-http-sidecar-port", "1"),
    ),
    "http": (
        *("--fastapi-root-path", "/behind/a/proxy", "--skip-server-warmup"),
        *("--served-model-name", "x", "--weight-version", "7", "--sampling-defaults", "openai"),
        *("--preferred-sampling-params", '{"top_p": 1.0}', "--allow-auto-truncate"),
        *("--stream-response-default-include-usage", "--file-storage-path", str(FOLDER / "files")),
        *("--stream-interval", "5", "--batch-notify-size", "2", "--random-seed", "9"),
        *("--asr-max-buffer-seconds", "9", "--asr-max-concurrent-sessions", "2"),
        *("--constrained-json-whitespace-pattern", " ?", "--disable-outlines-disk-cache"),
        *("--strip-thinking-cache", "--trust-remote-code", "--sampling-backend", "pytorch"),
    ),
    "scheduler": (
        *("--schedule-policy", "lpm", "--radix-eviction-policy", "lfu", "--page-size", "4"),
        *("--max-queued-requests", "64", "--prefill-max-requests", "2"),
        *("--max-prefill-tokens", "512", "--scheduler-recv-interval", "3"),
        *("--num-continuous-decode-steps", "4", "--schedule-conservativeness", "0.5"),
        *(
            "--enable-dynamic-chunking",
            "--chunked-prefill-size",
            "64",
            "--swa-full-tokens-ratio",
            "0.5",
        ),
        *("--disable-hybrid-swa-memory", "--disable-chunked-prefix-cache"),
        *("--enable-tokenizer-batch-encode", "--disable-tokenizer-batch-decode"),
        "--abort-on-priority-when-disabled",
        *("--context-length", "1024"),
        *("--mem-fraction-static", "0.5", "--disable-overlap-schedule", "--pre-warm-nccl"),
    ),
    "loading": (
        *("--load-format", "safetensors", "--model-impl", "sglang", "--model-config-parser", "hf"),
        *("--weight-loader-disable-mmap", "--weight-loader-drop-cache-after-load"),
        *("--weight-loader-prefetch-checkpoints", "--weight-loader-prefetch-num-threads", "2"),
        *("--model-loader-extra-config", "{}", "--download-dir", str(FOLDER / "downloads")),
        *("--revision", "main", "--tokenizer-path", str(TARGET), "--tokenizer-mode", "slow"),
        *("--enable-dynamic-batch-tokenizer", "--dynamic-batch-tokenizer-batch-size", "4"),
        *("--dynamic-batch-tokenizer-batch-timeout", "0.01", "--enable-multimodal"),
        *("--enable-fp32-lm-head", "--enable-draft-weights-cpu-backup"),
        *("--enable-weights-cpu-backup", "--disable-fast-image-processor"),
        *("--keep-mm-feature-on-device", "--limit-mm-data-per-request", '{"image": 1}'),
        *("--mm-process-config", "{}", "--enable-precise-embedding-interpolation"),
    ),
    "graphs": (
        *("--disable-cuda-graph", "--disable-cuda-graph-padding", "--cuda-graph-bs", "1", "2"),
        *("--enable-breakable-cuda-graph", "--enable-cudagraph-gc", "--debug-cuda-graph"),
        *("--disable-piecewise-cuda-graph", "--piecewise-cuda-graph-tokens", "4", "8"),
        *("--piecewise-cuda-graph-max-tokens", "64", "--disable-custom-all-reduce"),
        *("--enable-p2p-check", "--triton-attention-reduce-in-fp32"),
        *("--triton-attention-num-kv-splits", "4", "--triton-attention-split-tile-size", "64"),
        *("--flashinfer-mla-disable-ragged", "--disable-flashinfer-autotune"),
        *("--disable-shared-experts-fusion", "--tbo-token-distribution-threshold", "0.4"),
        *("--enforce-disable-flashinfer-allreduce-fusion", "--torch-compile-max-bs", "4"),
        *("--mm-attention-backend", "sdpa", "--base-gpu-id", "1", "--gpu-id-step", "2"),
        *("--enable-layerwise-nvtx-marker", "--enable-profile-cuda-graph"),
    ),
    "priorities": (
        *("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
        *("--default-priority-value", "1", "--disable-priority-preemption"),
        *("--priority-scheduling-preemption-threshold", "5"),
    ),
    "two ranks": ("--tp", "2", "--dist-timeout", "300"),
    "replicas": ("--dp-size", "2", "--load-balance-method", "total_requests"),
    "hooks": ("--forward-hooks", json.dumps([HOOK])),
    "code": (
        *("--radix-cache-backend", "users", "--warmups", "users"),
        *("--custom-weight-loader", "users.load", "--tool-server", "demo"),
    ),
    "template of completions": ("--completion-template", "deepseek_coder"),
    "template of chats": ("--model-path", str(NAMED), "--hf-chat-template-name", "other"),
    "thinking": (
        *("--model-path", str(THINKER), "--reasoning-parser", "deepseek-r1"),
        "--strip-thinking-cache",
    ),
    "numa": ("--numa-node", "0"),  # its processes must be spawned
    "fast tokens": ("--tokenizer-backend", "fastokens"),
    "checksum": ("--model-checksum", str(CHECKSUMS)),
    "config": ("--decrypted-config-file", str(TARGET / "config.json")),
    "deleted": ("--model-path", str(COPY), "--delete-ckpt-after-loading"),
    "traces": (
        *("--enable-trace", "--trace-modules", "request"),
        *("--otlp-traces-endpoint", "127.0.0.1:9"),  # where nobody listens
    ),
    "https": (
        *("--ssl-keyfile", str(KEY), "--ssl-certfile", str(CERTIFICATE)),
        *("--ssl-ca-certs", str(CERTIFICATE), "--enable-ssl-refresh"),
    ),
    "other models": (
        *("--fp8-gemm-backend", "triton", "--fp4-gemm-backend", "cutlass"),
        *("--eplb-algorithm", "deepseek", "--eplb-rebalance-num-iterations", "9"),
        *("--eplb-rebalance-layers-per-chunk", "2", "--ep-num-redundant-experts", "2"),
        *(
            "--eplb-min-rebalancing-utilization-threshold",
            "0.5",
            "--ep-dispatch-algorithm",
            "static",
        ),
        *("--expert-distribution-recorder-buffer-size", "5"),
        *("--kt-method", "AMXINT8", "--enable-single-batch-overlap"),
        *("--enforce-shared-experts-fusion", "--enable-fused-moe-sum-all-reduce"),
        *("--enable-broadcast-mm-inputs-process", "--mm-enable-dp-encoder"),
        *("--rl-quant-profile", "x", "--trace-modules", "request"),
        *("--enable-return-indexer-topk", "--elastic-ep-backend", "nixl"),
    ),
    "other devices": (
        *("--enable-nccl-nvls", "--enable-mscclpp", "--enable-torch-symm-mem"),
        *("--enable-fused-qk-norm-rope", "--piecewise-cuda-graph-compiler", "inductor"),
        *("--offload-num-in-group", "2", "--offload-prefetch-step", "2"),
        *("--offload-mode", "meta", "--enable-torch-compile-debug-mode"),
    ),
    "events": (
        "--kv-events-config",
        '{"publisher": "zmq", "topic": "kv", "endpoint": "tcp://127.0.0.1:*"}',
    ),
    "offload": ("--cpu-offload-gb", "1"),
}
# Flags that change the answers. Those of plain SGLang are the right ones.
CHANGED = ("hooks", "template of completions", "thinking")


def write_files() -> None:
    """What the flags name."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    paths = [str(distribution(FOLDER, "users", "1.0", USERS))]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    write_certificate(FOLDER)
    os.environ["REQUESTS_CA_BUNDLE"] = str(CERTIFICATE)
    generate_checksums(source=str(TARGET), output_path=str(CHECKSUMS))
    write_with_added_tokens(THINKER, ["<think>", "</think>"])
    shutil.copytree(TARGET, COPY)
    shutil.copytree(TARGET, NAMED)
    template = NAMED / "chat_template.jinja"
    config = json.loads((NAMED / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "another"},
        {"name": "other", "template": template.read_text()},
    ]
    (NAMED / "tokenizer_config.json").write_text(json.dumps(config))
    template.unlink()


def lines_of(client: Client, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    answer = client.post(path, {"stream": True, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def answers_of(client: Client) -> dict[str, Any]:
    """One chat, one stream of each API, and one request with a grammar; streams are joined."""
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": "x", "max_tokens": 48}
    chats = {**asked, "messages": messages, "temperature": 0}
    whole = client.post("/v1/chat/completions", chats)
    assert whole.status_code == 200, whole.text
    told = whole.json()["choices"][0]["message"]["content"]
    streamed = ""
    for event in lines_of(client, "/v1/chat/completions", **asked, messages=messages):
        for choice in event["choices"]:
            streamed += choice["delta"].get("content") or ""
    assert streamed == told
    completed = ""
    for event in lines_of(client, "/v1/completions", **asked, prompt=chat(PROMPT)):
        for choice in event["choices"]:
            completed += choice["text"]
    schema = json.dumps(SCHEMA)
    made = client.generate(chat(PROMPT), json_schema=schema, max_new_tokens=32)
    return {
        "chat": told,
        "completion": completed,
        "grammar": made["output_ids"],
        "tokens": client.generate(chat(PROMPT), max_new_tokens=48)["output_ids"],
    }


def try_flags(*flags: str, dflash: bool = True) -> dict[str, Any]:
    """The answers of a server with these flags, which then ends in time."""
    with doomed(*flags, dflash=dflash, forks="--numa-node" not in flags) as client:
        answers = answers_of(client)
        log = client.server.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
        family = processes(client)
        os.kill(client.server.pid, signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=ENDS_IN)
        assert not left, f"{ENDS_IN} s after SIGTERM there are {left}"
    return answers


def main(*names: str) -> None:
    write_files()
    usual = try_flags()
    for name in names or TRIED:
        started = time.monotonic()
        try:
            expected = try_flags(*TRIED[name], dflash=False) if name in CHANGED else usual
            answers = try_flags(*TRIED[name])
        except Exception as error:  # noqa: BLE001, the next one is tried
            said = f"FAILED {type(error).__name__}: {error}"
        else:
            wrong = [key for key in expected if answers[key] != expected[key]]
            said = f"other answers: {wrong}" if wrong else "equal"
        seconds = time.monotonic() - started
        print(f"{name} ({' '.join(TRIED[name])}), {seconds:.0f} s: {said}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
