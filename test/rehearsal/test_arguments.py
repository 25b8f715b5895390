"""Server arguments as SGLang and this package set them on an H100, for each kind of target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import server_args as sglang_args
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.server_args import ServerArgs

from sglang_dflash.engine.v0_5_13 import draft_worker
from sglang_dflash.errors import Refusal
from sglang_dflash.settings import platforms
from sglang_dflash.settings.options import DRAFT_AHEAD, FEATURES, VERIFY_WIDTH, Options
from sglang_dflash.targets import kv_dtype
from sglang_dflash.tiny import TARGET
from test.arguments import arguments
from test.checkpoints import BLOCK, LAYERS, write_draft
from test.gpu.test_quantised import METHODS, write_pair
from test.rehearsal.mutation import mutate
from test.rehearsal.serving import small_draft
from test.rehearsal.targets import KINDS, write_kind

DRAFT = {"num_target_layers": LAYERS, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRAFT_AHEAD, raising=False)
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")  # SGLang's default


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_draft(tmp_path_factory.mktemp("draft"), *small_draft(**DRAFT)))


USUAL: dict[str, Any] = {  # for every kind of target
    "target attention": ("fa3", "fa3"),
    "draft attention": "fa3",
    "kv_cache_dtype": "auto",
    "page_size": 1,
    "disable_overlap_schedule": True,
    "enable_flashinfer_allreduce_fusion": False,
    "disable_cuda_graph": False,
    "speculative_num_draft_tokens": BLOCK,
    "max_running_requests": 48,
    "draft ahead": True,
    "dtype": torch.bfloat16,
    "quantisation": None,
    "MLA": False,
    "two pools": False,
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "dense": {},
    "MLA": {"MLA": True},
    "GLM": {"MLA": True},
    "MoE": {},
    "sliding window": {},  # SGLang keeps Gemma 3 in one pool
    "two KV pools": {"two pools": True},
    "hybrid": {},
    "AWQ": {"dtype": torch.float16, "quantisation": "awq_marlin"},
    "GPTQ": {"dtype": torch.float16, "quantisation": "gptq_marlin"},
    "FP8": {"quantisation": "fp8"},
    "ModelOpt": {"quantisation": "modelopt_fp8"},
    "FP8 KV": {"quantisation": "modelopt_fp8"},
}


def settings(args: ServerArgs) -> dict[str, Any]:
    config = args.get_model_config()
    return {name: getattr(args, name) for name in USUAL if hasattr(args, name)} | {
        "target attention": args.get_attention_backends(),
        "draft attention": args.speculative_draft_attention_backend,
        "draft ahead": Options.read(args).draft_ahead,
        "verify attention": platforms.verify_backend(args),
        "dtype": config.dtype,
        "quantisation": config.quantization,
        "MLA": args.use_mla_backend(),
        "two pools": config.is_hybrid_swa,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    differ = {name: found[name] for name, value in expected.items() if found[name] != value}
    assert not differ, differ


def check_arguments(target: str, draft: str, expected: dict[str, Any], **given: Any) -> None:
    """Check the arguments of the server, and those that its draft is made from."""
    args = arguments(target, draft, **given)
    args.check_server_args()  # SGLang's own check, which it makes before it starts processes
    expected = USUAL | expected
    expected.setdefault("verify attention", expected["target attention"][0])
    assert_same(settings(args), expected)
    config = args.get_model_config()
    # SGLang sets it by itself when it loads a checkpoint with KV in FP8.
    args.kv_cache_dtype = "fp8_e4m3"
    made = draft_worker.draft_server_args(args, config.context_len, config.dtype)
    of_the_draft = {
        "attention": made.attention_backend,
        "attention of prefill and decode": made.get_attention_backends(),
        "dtype": made.dtype,
        "kv_cache_dtype": made.kv_cache_dtype,
        "context_length": made.context_length,
        "disable_cuda_graph": made.disable_cuda_graph,
        "disable_piecewise_cuda_graph": made.disable_piecewise_cuda_graph,
        "speculative_num_draft_tokens": made.speculative_num_draft_tokens,
    }
    backend = expected["draft attention"]
    wanted = {
        "attention": backend,
        "attention of prefill and decode": (backend, backend),
        "dtype": str(expected["dtype"]).removeprefix("torch."),
        "kv_cache_dtype": "auto",
        "context_length": 512,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "speculative_num_draft_tokens": BLOCK,
    }
    assert_same(of_the_draft, wanted)
    assert not args.disable_cuda_graph  # the draft has a copy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_kernels_of_a_quantised_draft(tmp_path: Path, method: str, dtype: str) -> None:
    """They know the target's dtype, which is the draft's."""
    quantised, _ = write_pair(tmp_path, method)
    args = arguments(str(TARGET), str(quantised), dtype=dtype)
    config = ModelConfig.from_server_args(
        args, model_path=args.speculative_draft_model_path, is_draft_model=True
    )
    kernels = get_quantization_config(config.quantization).from_config(METHODS[method][1])
    assert getattr(torch, dtype) in kernels.get_supported_act_dtypes()


def check_refusal(words: list[str], target: str, draft: str, **given: Any) -> None:
    """Check that the refusal is one paragraph that names the cause and the fix."""
    said = ""
    try:
        arguments(target, draft, **given)
    except Refusal as refusal:
        said = str(refusal)
    missing = [word for word in words if word not in said]
    assert not missing, (missing, said)
    assert "\n" not in said


@pytest.fixture
def target(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return write_kind(tmp_path, request.param)


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("target", kinds, indirect=True)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_arguments(draft: str, tmp_path: Path, kind: str) -> None:
    """The user gives only a target and a draft, and SGLang picks fa3 for both."""
    check_arguments(write_kind(tmp_path, kind), draft, UNUSUAL[kind])


def test_every_kind_is_judged() -> None:
    assert {*KINDS} == {*UNUSUAL}


@of_kinds("dense")
@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        ({"attention_backend": "fa3"}, "fa3", "fa3"),
        ({"attention_backend": "triton"}, "triton", "triton"),
        ({"attention_backend": "flashinfer"}, "flashinfer", "flashinfer"),
        ({"decode_attention_backend": "triton"}, "fa3", "triton"),
        ({"decode_attention_backend": "flashinfer"}, "fa3", "flashinfer"),
        ({"prefill_attention_backend": "flashinfer"}, "flashinfer", "fa3"),
        ({"prefill_attention_backend": "triton"}, "triton", "fa3"),
    ],
)
def test_explicit_backends(
    target: str, draft: str, given: dict[str, str], prefill: str, decode: str
) -> None:
    """The prefill backend verifies, and the draft uses the decode backend."""
    expected = {"target attention": (prefill, decode), "draft attention": decode}
    check_arguments(target, draft, expected, **given)


@of_kinds("dense")
def test_the_backend_that_verifies_can_be_that_of_decode(target: str, draft: str) -> None:
    given = {
        "prefill_attention_backend": "flashinfer",
        "speculative_attention_mode": "decode",
    }
    expected = {"target attention": ("flashinfer", "fa3"), "verify attention": "fa3"}
    check_arguments(target, draft, expected, **given)


@of_kinds("sliding window")
def test_flashinfer_cannot_verify_windows(target: str, draft: str) -> None:
    words = ["sliding-window layers", "--attention-backend fa3 or triton"]
    check_refusal(words, target, draft, attention_backend="flashinfer")
    check_refusal(words, target, draft, prefill_attention_backend="flashinfer")
    for backend in ("fa3", "triton"):
        expected = {"target attention": (backend, backend), "draft attention": backend}
        check_arguments(target, draft, expected, attention_backend=backend)


@of_kinds("dense")
@pytest.mark.parametrize("kv", ["bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_kv_dtypes(target: str, draft: str, kv: str) -> None:
    """The draft has the default, which is the model's dtype. SGLang knows no e5m2 in fa3."""
    given = {"kv_cache_dtype": kv}
    expected: dict[str, Any] = {"kv_cache_dtype": kv}
    if kv == "fp8_e5m2":
        given["attention_backend"] = backend = "flashinfer"
        both = {"target attention": (backend, backend), "draft attention": backend}
        check_arguments(target, draft, expected | both, **given)
    else:
        check_arguments(target, draft, expected, **given)


REFUSED_KV: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dense", {"kv_cache_dtype": "fp4_e2m1"}, ["fp4_e2m1", "Give --kv-cache-dtype fp8_e4m3"]),
    (
        "dense",
        {"kv_cache_dtype": "fp8_e5m2", "decode_attention_backend": "fa3"}
        | {"attention_backend": "flashinfer"},
        ["fa3 does not read KV in fp8_e5m2", "--kv-cache-dtype fp8_e4m3"],
    ),
    (
        "FP8 KV",
        {"decode_attention_backend": "flashinfer"},
        ["fa3 cannot verify for flashinfer", "--speculative-attention-mode decode"],
    ),
    ("dense", {"kv_cache_dtype": "fp8_e5m2"}, ["triton cannot", "--attention-backend flashinfer"]),
    ("MLA", {"kv_cache_dtype": "fp8_e4m3"}, ["latent attention", "--kv-cache-dtype bfloat16"]),
    ("AWQ", {"kv_cache_dtype": "fp8_e4m3"}, ["fa3 returns bfloat16", "--dtype bfloat16"]),
    ("AWQ", {"kv_cache_dtype": "bf16"}, ["computes in float16", "--dtype bfloat16"]),
    (
        "dense",
        {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": "scales.json"},
        ["--quantization-param-path", "a checkpoint that holds the scales"],
    ),
]


REFUSED_STATES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "hybrid",
        {"mamba_scheduler_strategy": "extra_buffer_lazy"},
        ["overlap scheduler", "Leave it out"],
    ),
    (
        "hybrid",
        {"mamba_scheduler_strategy": "extra_buffer", "enable_streaming_session": True},
        ["sessions", "Leave it out"],
    ),
    (
        "dense",
        {"mamba_scheduler_strategy": "extra_buffer"},
        ["no recurrent states", "Leave it out"],
    ),
    ("hybrid", {"dtype": "float16"}, ["states in bfloat16", "SGLANG_MAMBA_CONV_DTYPE=float16"]),
    ("hybrid", {"cpu_offload_gb": 1}, ["stay on the device", "--cpu-offload-gb"]),
    ("hybrid", {"offload_group_size": 2}, ["stay on the device", "--offload-group-size"]),
    ("hybrid", {"enable_lora": True}, ["linear attention", "Leave --enable-lora"]),
    ("hybrid", {"mamba_ssm_dtype": "bfloat16"}, ["rounds", "--mamba-ssm-dtype float32"]),
]


REPLICAS = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
WITH_ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}
REFUSED_REPLICAS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("hybrid", {}, ["recurrent states", "Leave --enable-dp-attention out"]),
    ("MLA", {"speculative_dflash_block_size": 5}, ["5 tokens", "2 ranks", "block-size"]),
    ("dense", WITH_ADAPTERS, ["LoRA", "Leave --enable-dp-attention out"]),
    (
        "dense",
        {"enable_hierarchical_cache": True},
        ["--enable-hierarchical-cache", "Leave --enable-dp-attention out"],
    ),
    (
        "dense",
        {"enable_dp_attention_local_control_broadcast": True},
        ["new weights of the draft", "Leave it out"],
    ),
    ("MoE", {"expert_distribution_recorder_mode": "stat"}, ["recorder of experts", "Leave"]),
    ("MoE", {"enable_expert_distribution_metrics": True}, ["recorder of experts", "Leave"]),
    ("MoE", {"moe_runner_backend": "flashinfer_cutlass"}, ["hidden states", "Add --disable"]),
    ("dense", {"enforce_piecewise_cuda_graph": True}, ["by itself", "Leave it out"]),
]
APART = {"disaggregation_mode": "decode"}
REFUSED_APART: list[tuple[str, dict[str, Any], list[str]]] = [
    ("dense", {"disaggregation_transfer_backend": "fake"}, ["-backend fake", "Give mooncake"]),
    ("dense", {"disaggregation_transfer_backend": "nixl"}, ["an abort", "Give mooncake"]),
    (
        "dense",
        {"disaggregation_decode_enable_offload_kvcache": True},
        ["the target's KV only", "Leave it out"],
    ),
    ("dense", {"enable_hierarchical_cache": True}, ["--enable-hierarchical-cache", "Leave one of"]),
    ("two KV pools", {}, ["sliding-window layers", "Leave --disaggregation-mode out"]),
    ("MLA", REPLICAS, ["--dp-size 2", "Leave one of"]),
    ("dense", {"dp_size": 2}, ["--dp-size 2", "Leave one of"]),
]
HOST = {"enable_hierarchical_cache": True}
REFUSED_HOST_CACHES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("hybrid", {}, ["recurrent states", "does not copy the draft's KV", "Leave"]),
    ("two KV pools", {}, ["sliding-window layers", "does not copy the draft's KV", "Leave"]),
    ("MLA", {}, ["latent attention", "Leave --enable-hierarchical-cache"]),
    (
        "dense",
        {"hicache_storage_backend": "file"},
        ["-backend file", "accepted less", "Leave", "SGLANG_PLUGINS=dflash_cpu"],
    ),
    ("dense", {"hicache_mem_layout": "page_head"}, ["page_head", "Give --hicache-mem-layout"]),
]


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        *REFUSED_KV,
        *REFUSED_STATES,
        *((kind, REPLICAS | given, words) for kind, given, words in REFUSED_REPLICAS),
        *((kind, APART | given, words) for kind, given, words in REFUSED_APART),
        *((kind, HOST | given, words) for kind, given, words in REFUSED_HOST_CACHES),
    ],
    ids=lambda given: str(given)[:60],
)
def test_refused(
    draft: str, tmp_path: Path, kind: str, given: dict[str, Any], words: list[str]
) -> None:
    check_refusal(words, write_kind(tmp_path, kind), draft, **given)


@of_kinds("MLA")
def test_replicas(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All verify whole blocks, and each has all of the vocabulary."""
    given = arguments(target, draft, **REPLICAS)
    assert given.enable_dp_lm_head
    assert Options.read(given).verify_widths == (BLOCK,)
    assert given.max_running_requests == 2 * 48
    for width in ("auto", "4"):
        monkeypatch.setenv(VERIFY_WIDTH, width)
        check_refusal(
            [f"{width} does not work", "one width", "Give full"], target, draft, **REPLICAS
        )


@of_kinds("dense")
def test_prefill_and_decode_apart(
    target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(target, draft, disaggregation_decode_enable_radix_cache=True, **APART)
    assert not given.disable_radix_cache
    assert arguments(target, draft, disaggregation_mode="prefill").disable_cuda_graph
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    check_refusal(["SGLANG_DISAGG_STAGING_BUFFER", "Unset it"], target, draft, **APART)
    monkeypatch.delenv("SGLANG_DISAGG_STAGING_BUFFER")
    monkeypatch.setenv(FEATURES, str(tmp_path))
    check_refusal(["features of a part of a request", "Leave"], target, draft, **APART)


@of_kinds("dense")
def test_a_host_cache_without_the_layers_of_the_draft(target: str, tmp_path: Path) -> None:
    """SGLang loads layer i of the draft with layer i of the target."""
    deep = str(write_draft(tmp_path / "deep", *small_draft(**DRAFT, num_hidden_layers=LAYERS + 1)))
    check_refusal([f"{LAYERS + 1} layers", f"the target {LAYERS}"], target, deep, **HOST)


@of_kinds("dense")
@pytest.mark.parametrize("name", ["SGLANG_ENABLE_UNIFIED_RADIX_TREE"])
def test_a_host_cache_of_another_tree(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    check_refusal([name, "draft's KV", f"Unset {name}"], target, draft, **HOST)


@of_kinds("dense")
@pytest.mark.parametrize(("backend", "copies"), [("fa3", "direct"), ("flashinfer", "kernel")])
def test_fa3_does_not_run_beside_copy_kernels(
    target: str, draft: str, backend: str, copies: str
) -> None:
    """SGLang would verify with fa3 and draft with flashinfer, while its kernels copy."""
    given = HOST | {"attention_backend": backend}
    both = {"target attention": (backend, backend), "draft attention": backend}
    check_arguments(target, draft, both, **given)
    assert arguments(target, draft, **given).hicache_io_backend == copies


@of_kinds("FP8 KV")
def test_a_way_out_of_two_backends(target: str, draft: str) -> None:
    given = {
        "decode_attention_backend": "flashinfer",
        "speculative_attention_mode": "decode",
    }
    backends = {"target attention": ("fa3", "flashinfer"), "draft attention": "flashinfer"}
    expected = backends | {"verify attention": "flashinfer", "quantisation": "modelopt_fp8"}
    check_arguments(target, draft, expected, **given)


REFUSED_BACKENDS: dict[str, tuple[str, dict[str, str]]] = {  # words of the refusal, other flags
    "flashmla": ("a kernel for blocks that has not been compared", {}),
    "cutlass_mla": ("one token per request", {}),
    "trtllm_mla": ("Blackwell", {}),
    "cutedsl_mla": ("Blackwell", {"prefill_attention_backend": "triton"}),
    "tokenspeed_mla": ("needs KV in FP8", {"kv_cache_dtype": "fp8_e4m3"}),
    "fa4": ("K and V of each head", {}),
    "dsa": ("sparse attention", {}),
}


@of_kinds("MLA")
@pytest.mark.parametrize("backend", REFUSED_BACKENDS)
def test_backends_of_mla_that_cannot_verify(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The refusal says why, and names a backend that is then accepted."""
    reason, given = REFUSED_BACKENDS[backend]
    given = {"attention_backend": backend} | given
    if backend not in ("flashmla", "cutlass_mla", "dsa"):
        on_blackwell(monkeypatch)
    check_refusal([backend, reason, "--attention-backend triton"], target, draft, **given)
    expected = {"target attention": ("triton", "triton"), "draft attention": "triton", "MLA": True}
    check_arguments(target, draft, expected, attention_backend="triton")


def on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang pick the server arguments of a B200."""
    monkeypatch.setattr(sglang_args, "is_sm90_supported", lambda: False)
    monkeypatch.setattr(sglang_args, "is_hopper_with_cuda_12_3", lambda: False)
    monkeypatch.setattr(sglang_args, "is_sm100_supported", lambda: True)
    monkeypatch.setattr(sglang_args, "is_blackwell_supported", lambda: True)


@of_kinds("MLA", "GLM")
@pytest.mark.parametrize("backend", [None, "triton", "flashinfer"])
def test_backends_of_mla_on_blackwell(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    """SGLang picks trtllm_mla for DeepSeek by itself, and flashinfer for GLM."""
    on_blackwell(monkeypatch)
    deepseek = "DeepseekV3" in (Path(target) / "config.json").read_text()
    if backend is None and deepseek:
        check_refusal(["trtllm_mla", "Give --attention-backend triton"], target, draft)
        return
    picked = backend or "flashinfer"
    expected = {"target attention": (picked, picked), "draft attention": picked, "MLA": True}
    check_arguments(target, draft, expected, attention_backend=backend)


@of_kinds("MLA")
@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [
        ({"decode_attention_backend": "flashinfer"}, "fa3", "flashinfer"),
        ({"prefill_attention_backend": "triton"}, "triton", "fa3"),
        ({"attention_backend": "flashinfer", "page_size": 16}, "flashinfer", "flashinfer"),
    ],
)
def test_explicit_backends_of_mla(
    target: str, draft: str, given: dict[str, Any], prefill: str, decode: str
) -> None:
    """Prefill and decode apart, and larger pages, which none of these backends changes."""
    expected = {"target attention": (prefill, decode), "draft attention": decode, "MLA": True}
    check_arguments(target, draft, expected | {"page_size": given.get("page_size", 1)}, **given)


@of_kinds("MLA")
def test_backends_of_mla_apart(target: str, draft: str) -> None:
    """A decode backend alone is refused, too, with its own reason."""
    words = ["flashmla", "has not been compared", "--attention-backend triton"]
    check_refusal(words, target, draft, decode_attention_backend="flashmla")


@of_kinds("MLA")
@pytest.mark.parametrize("given", [{}, {"attention_backend": "triton"}], ids=str)
def test_sparse_attention_of_deepseek(target: str, draft: str, given: dict[str, Any]) -> None:
    """SGLang changes other arguments for it before this package checks them."""
    file = Path(target) / "config.json"
    picks = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
    architecture = {"architectures": ["DeepseekV32ForCausalLM"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | picks | architecture))
    check_refusal(["DSA", "without --speculative-algorithm DFLASH"], target, draft, **given)


@of_kinds("dense")
def test_a_draft_with_windows(target: str, tmp_path: Path) -> None:
    """triton and fa3, the default, compute them. flashinfer does not."""
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 32}
    path = str(write_draft(tmp_path / "windows", *small_draft(**DRAFT | windows)))
    advised = "--speculative-draft-attention-backend triton or fa3"
    given = {"speculative_draft_attention_backend": "flashinfer"}
    check_refusal(["sliding-window layers", advised], target, path, **given)
    check_arguments(target, path, {"draft attention": "fa3"})
    given = {"speculative_draft_attention_backend": "triton"}
    check_arguments(target, path, {"draft attention": "triton"}, **given)


@of_kinds("dense")
def test_a_draft_that_predicts_from_the_anchor(target: str, tmp_path: Path) -> None:
    """The target verifies one token more than the draft reads."""
    method = {"sample_from_anchor": True, "target_layer_ids": [0, 1]}
    path = str(write_draft(tmp_path / "anchor", *small_draft(**DRAFT, dflash_config=method)))
    check_arguments(target, path, {"speculative_num_draft_tokens": BLOCK + 1})


@of_kinds("MLA", "MoE", "two KV pools")
def test_all_reduces_are_not_fused(target: str, draft: str) -> None:
    """SGLang fuses them by itself on Hopper with two or more GPUs."""
    assert ServerArgs(model_path=target, tp_size=2).enable_flashinfer_allreduce_fusion
    assert not arguments(target, draft, tp_size=2).enable_flashinfer_allreduce_fusion


@dataclass
class Mutation:
    function: str
    old: str
    new: str
    kind: str = "dense"
    given: dict[str, Any] = field(default_factory=dict)  # flags
    expected: dict[str, Any] = field(default_factory=dict)  # of the unchanged code


FLASHINFER = {"decode_attention_backend": "flashinfer"}
MIXED = {"target attention": ("fa3", "flashinfer"), "draft attention": "flashinfer"}
ARGUMENT_MUTATIONS = {  # key: the argument that the mutation makes wrong
    "enable_flashinfer_allreduce_fusion": Mutation(
        "engine.v0_5_13.server_args:handle_dflash",
        "server_args.enable_flashinfer_allreduce_fusion = False",
        "pass",
        kind="MoE",
        given={"tp_size": 2},
    ),
    "disable_overlap_schedule": Mutation(
        "engine.v0_5_13.server_args:handle_dflash",
        "server_args.disable_overlap_schedule = True",
        "pass",
    ),
    "draft ahead": Mutation(
        "settings.options:asked_ahead", "platform_of(server_args).draft_ahead", '"off"'
    ),
    "verify attention": Mutation(
        "settings.platforms:verify_backend",
        "return str(prefill if",
        "return str(decode if",
        given=FLASHINFER,
        expected=MIXED,
    ),
    "draft attention": Mutation(
        "engine.draft_rules:draft_backend",
        "facts.decode",
        "facts.prefill",
        given=FLASHINFER,
        expected=MIXED,
    ),
    "dtype": Mutation(
        "engine.v0_5_13.draft_worker:draft_server_args",
        'args.dtype = str(dtype).removeprefix("torch.")',
        "pass",
        kind="AWQ",
        expected=UNUSUAL["AWQ"],
    ),
    "kv_cache_dtype": Mutation(
        "engine.v0_5_13.draft_worker:draft_server_args", 'args.kv_cache_dtype = "auto"', "pass"
    ),
    "context_length": Mutation(
        "engine.v0_5_13.draft_worker:draft_server_args", "args.context_length = context_len", "pass"
    ),
    "disable_cuda_graph": Mutation(
        "engine.v0_5_13.draft_worker:draft_server_args", "args.disable_cuda_graph = args.", "args."
    ),
    "attention of prefill and decode": Mutation(
        "engine.v0_5_13.draft_worker:draft_server_args",
        "args.prefill_attention_backend = args.decode_attention_backend = None",
        "pass",
        given={"prefill_attention_backend": "triton"},
        expected={"target attention": ("triton", "fa3")},
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("argument", ARGUMENT_MUTATIONS)
def test_a_wrong_argument_is_seen(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    mutation = ARGUMENT_MUTATIONS[argument]
    asked = write_kind(tmp_path, mutation.kind), draft, mutation.expected
    check_arguments(*asked, **mutation.given)
    mutate(monkeypatch, mutation.function, mutation.old, mutation.new)
    with pytest.raises(AssertionError, match=f"'{argument}'"):
        check_arguments(*asked, **mutation.given)


MISSING_RULES = [  # the refusal's number in REFUSED_KV, and how the subject of its rule begins
    (1, "`--kv-cache-dtype fp8_e5m2` with fa3"),
    (2, "KV in FP8 with different backends"),
    (3, "KV in FP8 with triton"),
    (4, "KV in FP8 of targets with latent attention"),
    (5, "KV in FP8 with `--dtype float16`"),
    (6, "`--kv-cache-dtype` other than"),
    (7, "`--quantization-param-path`"),
]


@pytest.mark.ci
@pytest.mark.parametrize(("number", "subject"), MISSING_RULES)
def test_a_missing_rule_of_kv_is_seen(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, subject: str
) -> None:
    kind, given, words = REFUSED_KV[number]
    others = tuple(rule for rule in kv_dtype.RULES if not rule.subject.startswith(subject))
    assert len(others) == len(kv_dtype.RULES) - 1
    monkeypatch.setattr(kv_dtype, "RULES", others)
    with pytest.raises(AssertionError):
        check_refusal(words, write_kind(tmp_path, kind), draft, **given)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "function", "old", "new"),
    [
        (0, "targets.kv_dtype:refuse_fp4_kv", "refuse([FP4], server_args)", "pass"),
        (2, "targets.kv_dtype:_has_fp8_kv", '== "FP8"', '== "fp8"'),
    ],
)
def test_a_missing_refusal_of_kv_is_seen(
    draft: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    function: str,
    old: str,
    new: str,
) -> None:
    kind, given, words = REFUSED_KV[number]
    target = write_kind(tmp_path, kind)
    mutate(monkeypatch, function, old, new)
    with pytest.raises((AssertionError, RuntimeError)):  # SGLang's own, for FP4
        check_refusal(words, target, draft, **given)


@pytest.mark.ci
def test_a_missing_refusal_is_seen(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, words = write_kind(tmp_path, "sliding window"), ["sliding-window"]
    check_refusal(words, target, draft, attention_backend="flashinfer")
    told = 'hasattr(cls, "get_attention_sliding_window_size")'
    mutate(monkeypatch, "engine.target_rules:has_windows", told, "False")
    with pytest.raises(AssertionError, match=words[0]):
        check_refusal(words, target, draft, attention_backend="flashinfer")
