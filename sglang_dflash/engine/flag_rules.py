"""Flags of SGLang that a DFLASH server refuses."""

from __future__ import annotations

import shutil
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.constrained.base_grammar_backend import GRAMMAR_BACKEND_REGISTRY
from sglang.srt.environ import envs

from sglang_dflash.errors import WITHOUT_DFLASH, Rule
from sglang_dflash.settings.facts import Facts
from sglang_dflash.settings.options import given_flags
from sglang_dflash.settings.platforms import PLATFORMS

TOGETHER = "blocks have not been compared with such a division of experts and MLPs"
ONE_STEP = "it puts prefill and decode into one step, and here they are separate"
FLASHINFER_GDN = "its kernel that verifies a block has not been compared with this package"


@dataclass(frozen=True)
class Flag:
    """A flag that has values which are refused."""

    name: str  # of the server argument
    served: tuple[Any, ...]  # values
    why: str  # others are not
    fix: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def given(self, facts: Facts) -> str:
        """The flag as it was given, if it is refused."""
        value = getattr(facts.args, self.name)
        if value in self.served:
            return ""
        return self.flag if value is True else f"{self.flag} {value}"

    def rule(self) -> Rule[Facts]:
        switch = self.served[-1] is False
        others = ", ".join(f"`{value}`" for value in self.served if value not in (None, ""))
        subject = f"`{self.flag}`" if switch or not others else f"`{self.flag}` other than {others}"
        what = f"DFLASH does not work with {{found}}: {self.why}."
        return Rule(subject, self.given, what, self.fix)

    def rule_on_a_cpu(self) -> Rule[Facts]:
        everywhere = self.rule()
        return replace(
            everywhere,
            subject=f"{everywhere.subject} on a CPU",
            applies=lambda facts: self.given(facts) if facts.args.device == "cpu" else "",
            what=f"DFLASH does not work with {{found}} on a CPU: {self.why}.",
        )


FLAGS = (
    Flag("speculative_num_steps", (None, 1), "DFLASH drafts a block in one step", "Leave it out."),
    Flag("speculative_eagle_topk", (None, 1), "a block is a chain, not a tree", "Leave it out."),
    Flag(
        "speculative_accept_threshold_single", (1.0,), "it makes output lossy", "Leave it at 1.0."
    ),
    Flag("speculative_accept_threshold_acc", (1.0,), "it makes output lossy", "Leave it at 1.0."),
    Flag(
        "speculative_token_map", (None,), "the draft has the target's vocabulary", "Leave it out."
    ),
    Flag("speculative_adaptive", (False,), "it adapts EAGLE's steps", "Leave it out."),
    Flag("speculative_moe_a2a_backend", (None,), "the draft has no experts", "Leave it out."),
    Flag(
        "enable_prefill_context_parallel",
        (False,),
        "each rank then has the hidden states of a part of the prompt",
        "Use tensor parallelism instead.",
    ),
    Flag(
        "attn_cp_size",
        (1,),
        "each rank then has the hidden states of a part of the tokens",
        "Use tensor parallelism instead.",
    ),
    Flag("moe_a2a_backend", ("none",), TOGETHER, "Leave it out."),
    Flag("moe_dense_tp_size", (None,), TOGETHER, "Leave it out."),
    Flag(
        "enable_attn_tp_input_scattered",
        (False,),
        "each rank then has the hidden states of a part of the prompt",
        "Leave it out.",
    ),
    Flag(
        "pp_size",
        (1,),
        "the draft reads layers that are on several ranks",
        "Use tensor parallelism instead.",
    ),
    Flag(
        "enable_lora_overlap_loading",
        (None, False),
        "it changes adapters while a batch runs, which has not been compared",
        "Leave it out.",
    ),
    Flag(
        "lora_use_virtual_experts", (False,), "adapters on experts are not served", "Leave it out."
    ),
    Flag("enable_lmcache", (False,), "its hits would lack the draft's KV", "Leave it out."),
    Flag(
        "enable_hisparse",
        (False,),
        "it moves KV of the target to the host, and the draft's does not follow",
        "Leave it out.",
    ),
    Flag("enable_mixed_chunk", (False,), ONE_STEP, "Leave it out."),
    Flag(
        "enable_prefill_delayer",
        (False,),
        "SGLang's delayer needs the overlap scheduler, and a block's commit is waited for",
        "Leave it out.",
    ),
    Flag("linear_attn_decode_backend", (None, "triton", "cutedsl"), FLASHINFER_GDN, "Give triton."),
    Flag(
        "linear_attn_prefill_backend", (None, "triton", "cutedsl"), FLASHINFER_GDN, "Give triton."
    ),
    Flag("linear_attn_backend", ("triton", "cutedsl"), FLASHINFER_GDN, "Give triton."),
    Flag("enable_pdmux", (False,), ONE_STEP, "Leave it out."),
    Flag(
        "grpc_mode",
        (False,),
        "its server hands requests to the scheduler unchecked, and wrong ones crash it",
        "Serve HTTP.",
    ),
    Flag(
        "use_ray",
        (False,),
        "SGLang loads no plugins in Ray's actors, so its own DFLASH would serve there",
        "Leave it out.",
    ),
    Flag(
        "enable_two_batch_overlap",
        (False,),
        "it splits a batch into two forwards, and a block is not split",
        "Leave it out.",
    ),
    Flag(
        "debug_tensor_dump_output_folder",
        (None,),
        "SGLang cannot write the lists of hidden states that the draft reads",
        "Leave it out.",
    ),
    Flag(
        "is_embedding",
        (False,),
        "such a server writes no text, so nothing is drafted",
        "Leave --speculative-algorithm out.",
    ),
    Flag(
        "dllm_algorithm",
        (None,),
        "it is for targets that write blocks by diffusion themselves",
        "Leave it out.",
    ),
)

# The same for a CPU: SGLang would end with a traceback, most while it loads the target.
FLAGS_ON_A_CPU = (
    Flag(
        "enable_torch_compile",
        (False,),
        "SGLang compiles there for servers without speculation only",
        "Leave it out.",
    ),
    Flag("kv_canary", ("none",), "SGLang's canary needs CUDA", "Leave it out."),
    Flag("rl_on_policy_target", (None,), "SGLang computes its RoPE on CUDA", "Leave it out."),
    Flag(
        "enable_forward_pass_metrics",
        (False,),
        "SGLang times each forward with events of CUDA",
        "Leave it out.",
    ),
    Flag("enable_symm_mem", (False,), "it is memory of CUDA", "Leave it out."),
    Flag("torchao_config", ("",), "quantised weights are not served there", "Leave it out."),
    Flag("enforce_piecewise_cuda_graph", (False,), "these are graphs of CUDA", "Leave it out."),
    Flag(
        "offload_group_size",
        (-1, 0),
        "SGLang copies the weights in a stream of CUDA",
        "Leave it out.",
    ),
)


def _unchecked_keys(facts: Facts) -> str:
    """API keys that nothing would check, and the flag that is the reason."""
    args = facts.args
    keys = {"--api-key": args.api_key, "--admin-api-key": args.admin_api_key}
    given = [flag for flag, key in keys.items() if key is not None]
    return " and ".join(given) if args.enable_http2 or args.tokenizer_worker_num > 1 else ""


def _key_without_password(flag: str) -> Rule[Facts]:
    name = flag.removeprefix("--").replace("-", "_")

    def applies(facts: Facts) -> bool:
        args = facts.args
        asked = args.ssl_certfile is not None and args.ssl_keyfile_password is not None
        return bool(asked and getattr(args, name))

    return Rule(
        f"`{flag}` with `--ssl-keyfile-password`",
        applies,
        f"{flag} does not work with --ssl-keyfile-password: SGLang would load the key without its "
        "password.",
        "Leave one of them out.",
    )


def _certificate_error(facts: Facts) -> str:
    """Why the files of HTTPS cannot be used.

    SGLang reads them when the target is loaded, which may take minutes. Without a password OpenSSL
    would ask for it on the terminal.
    """
    args = facts.args
    if args.ssl_certfile is None:
        return ""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password or ""
        )
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except OSError as error:
        return str(error)
    return ""


def _lacks_numactl(facts: Facts) -> bool:
    """SGLang starts a shell script that ends when it does not find the command."""
    needed = facts.args.numa_node is not None and envs.SGLANG_NUMA_BIND_V2.get()
    return bool(needed and shutil.which("numactl") is None)


def _strict_thinking_fails(facts: Facts) -> bool:
    """SGLang fails when its scheduler starts or, with some parsers, at the first request."""
    args, backend = facts.args, facts.args.grammar_backend
    if not args.enable_strict_thinking or backend in GRAMMAR_BACKEND_REGISTRY:
        return False
    return bool(backend == "none" or (backend != "xgrammar" and args.reasoning_parser is not None))


def _unknown_detokenizer(facts: Facts) -> bool:
    """SGLang divides answers among detokenizers by the tokenizer worker that a request names.

    Without a tokenizer, SGLang starts no detokenizers.
    """
    args = facts.args
    many = args.detokenizer_worker_num > 1 and not args.skip_tokenizer_init
    return bool(many and args.tokenizer_worker_num == 1)


def _flags_of_a_draft(facts: Facts) -> str:
    args = facts.args
    given = given_flags()
    if args.speculative_draft_model_path is not None:
        given.append("--speculative-draft-model-path")
    if args.speculative_dflash_block_size is not None:
        given.append("--speculative-dflash-block-size")
    return f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'}" if given else ""


def _missing_target(facts: Facts) -> bool:
    path = facts.args.model_path
    return path.startswith((".", "/", "~")) and not Path(path).exists()


# Of a server of any algorithm, because SGLang would ignore them without a word.
WITHOUT_ALGORITHM: Rule[Facts] = Rule(
    "flags of a draft without `--speculative-algorithm`",
    _flags_of_a_draft,
    "Nothing is drafted without --speculative-algorithm, but {found} given.",
    "Add --speculative-algorithm DFLASH, or leave out the other flags.",
)
MISSING_TARGET: Rule[Facts] = Rule(
    "a folder as `--model-path` that does not exist",
    _missing_target,
    "There is no target {f.args.model_path}.",
    "Give the path of a target.",
)
NO_WINDOW: Rule[Facts] = Rule(
    "`--speculative-draft-window-size` below 1",
    lambda f: (
        f.args.speculative_draft_window_size is not None
        and f.args.speculative_draft_window_size < 1
    ),
    "--speculative-draft-window-size {f.args.speculative_draft_window_size} is not possible.",
    "Give a number of tokens, at least the block size.",
)
# SGLang changes or reads the flags of these before it comes to those of speculation.
FIRST = (WITHOUT_ALGORITHM, MISSING_TARGET, NO_WINDOW)
RULES: tuple[Rule[Facts], ...] = (
    Rule(
        f"`--device` other than {', '.join(PLATFORMS)}",
        lambda f: f.args.device not in PLATFORMS,
        "DFLASH does not run on {f.args.device}.",
        f"Serve on {' or '.join(PLATFORMS)}, or without --speculative-algorithm DFLASH.",
    ),
    Rule(
        "targets with sparse attention (DSA)",
        lambda f: is_deepseek_dsa(f.target.hf_config),  # SGLang sets flags for it
        "The target {f.args.model_path} uses sparse attention (DSA) with backends of its own, and "
        "this release cannot verify with them.",
        WITHOUT_DFLASH,
    ),
    *(flag.rule() for flag in FLAGS),
    *(flag.rule_on_a_cpu() for flag in FLAGS_ON_A_CPU),
    Rule(
        "`--lora-backend` other than csgmv, triton (on a CPU torch_native), with adapters",
        lambda f: f.adapters and f.args.lora_backend not in f.platform.lora_backends,
        "--lora-backend {f.args.lora_backend} does not serve LoRA adapters with DFLASH "
        "{f.platform.place}.",
        "Give --lora-backend {f.lora_backends}.",
    ),
    Rule(
        "`--api-key`, `--admin-api-key` with `--enable-http2`",
        lambda f: _unchecked_keys(f) if f.args.enable_http2 else "",
        "{found} would not be checked with --enable-http2: SGLang then serves HTTP from other "
        "processes, which know no keys.",
        "Leave --enable-http2 out, or check keys in front of the server.",
    ),
    Rule(
        "`--api-key`, `--admin-api-key` with `--tokenizer-worker-num`",
        _unchecked_keys,
        "{found} would not be checked with --tokenizer-worker-num: SGLang then serves HTTP from "
        "other processes, which know no keys.",
        "Leave --tokenizer-worker-num out, or check keys in front of the server.",
    ),
    Rule(
        "`--nccl-port` with `--dp-size`",
        lambda f: (
            f.args.dp_size > 1 and not f.args.enable_dp_attention and f.args.nccl_port is not None
        ),
        "--nccl-port {f.args.nccl_port} is one port, and each of --dp-size {f.args.dp_size} "
        "replicas needs its own.",
        "Leave --nccl-port out.",
    ),
    _key_without_password("--enable-ssl-refresh"),
    _key_without_password("--enable-http2"),
    Rule(
        "`--ssl-certfile` and other files of HTTPS that cannot be read",
        _certificate_error,
        "HTTPS cannot be served with --ssl-certfile {f.args.ssl_certfile} and --ssl-keyfile "
        "{f.args.ssl_keyfile}: {found}.",
        "Give a certificate, its key, and --ssl-keyfile-password if the key has one.",
    ),
    Rule(
        "`--custom-sigquit-handler` as text",
        lambda f: isinstance(f.args.custom_sigquit_handler, str),  # only an Engine can give one
        "--custom-sigquit-handler {f.args.custom_sigquit_handler} is text, and SGLang needs a "
        "function.",
        "Leave it out, or give a function to sglang.Engine.",
    ),
    Rule(
        "`--numa-node` without numactl",
        _lacks_numactl,
        "--numa-node starts processes with the command numactl, which is not there.",
        "Install numactl, or leave the flag out.",
    ),
    Rule(
        "`--enable-strict-thinking` with other grammar backends than xgrammar",
        _strict_thinking_fails,
        "--enable-strict-thinking does not work with --grammar-backend {f.args.grammar_backend}: "
        "only the masks of xgrammar can filter the tokens of a thought.",
        "Give --grammar-backend xgrammar.",
    ),
    Rule(
        "`--detokenizer-worker-num` with one tokenizer worker",
        _unknown_detokenizer,
        "--detokenizer-worker-num {f.args.detokenizer_worker_num} ends the server at its first "
        "request: SGLang chooses a detokenizer by the tokenizer worker of the request, and a "
        "request of a single one names none.",
        "Leave it out, or add --tokenizer-worker-num 2 or more.",
    ),
    Rule(
        "`--speculative-moe-runner-backend`",
        lambda f: f.args.speculative_moe_runner_backend != f.args.moe_runner_backend,
        "DFLASH drafts have no experts.",
        "Leave --speculative-moe-runner-backend out.",
    ),
)
