"""Prefill and decode on servers of their own (`--disaggregation-mode`): which pairs are served.

SGLang sends KV by address alone, whatever a buffer holds. So both servers must have one draft in
one layout. The decode server asks the prefill server before the first request, at the bootstrap
server where it learns the ranks. The prefill server counts the buffers of a decode server.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import requests
from aiohttp import web
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

from sglang_dflash.checkpoint.files import open_file
from sglang_dflash.checkpoint.formats.lilicorr import LiLiCorr
from sglang_dflash.checkpoint.served import draft_config
from sglang_dflash.errors import Rule, refuse
from sglang_dflash.seam.flags import attention_tp_size
from sglang_dflash.seam.patched import temporarily
from sglang_dflash.settings.facts import DraftFacts
from sglang_dflash.settings.options import FEATURES, FLAGS, Features

logger = logging.getLogger(__name__)

READ_AT_ONCE = 16 * 2**20  # bytes of a file
ROUTE = "/dflash"  # of the bootstrap server
SECONDS = 5  # until it answers, as SGLang itself waits
IN_ONE = "Leave --disaggregation-mode out."
RULES: tuple[Rule[DraftFacts], ...] = (
    Rule(
        "`--disaggregation-transfer-backend nixl`",
        lambda f: f.args.disaggregation_transfer_backend == "nixl",
        "--disaggregation-transfer-backend nixl: an abort ends a thread of the prefill server.",
        "Give mooncake.",
    ),
    Rule(
        "`--disaggregation-transfer-backend` other than mooncake",
        lambda f: f.args.disaggregation_transfer_backend != "mooncake",
        "DFLASH has not been compared with --disaggregation-transfer-backend "
        "{f.args.disaggregation_transfer_backend}.",
        "Give mooncake.",
    ),
    Rule(
        "`--disaggregation-mode` with `SGLANG_DISAGG_STAGING_BUFFER`",
        lambda f: envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "SGLANG_DISAGG_STAGING_BUFFER does not send the draft's KV.",
        "Unset it.",
    ),
    Rule(
        "`--disaggregation-decode-enable-offload-kvcache`",
        lambda f: f.args.disaggregation_decode_enable_offload_kvcache,
        "--disaggregation-decode-enable-offload-kvcache stores the target's KV only.",
        "Leave it out.",
    ),
    Rule(
        "`--disaggregation-mode` with `--enable-hierarchical-cache`, `--dp-size`, multimodal "
        "targets",
        lambda f: (
            (f.args.enable_hierarchical_cache and "--enable-hierarchical-cache")
            or (f.args.dp_size > 1 and f"--dp-size {f.args.dp_size}")
            or (f.target.is_multimodal and "a target that reads images")
        ),
        "--disaggregation-mode has not been compared with {found}.",
        "Leave one of them out.",
    ),
    Rule(
        f"`--disaggregation-mode` with `{FLAGS[FEATURES]}`",
        lambda _: Features.read(),
        f"{FLAGS[FEATURES]} (or {FEATURES}) does not work with --disaggregation-mode: each server "
        "has the features of a part of a request.",
        IN_ONE,
    ),
    Rule(
        "`--disaggregation-mode`, LiLiCorr drafts",
        lambda f: isinstance(f.draft.family, LiLiCorr),
        "The draft {f.draft.path} reads hidden states that the prefill server does not send.",
        IN_ONE,
    ),
    Rule(
        "`--disaggregation-mode`, targets with two KV pools (sliding windows)",
        lambda f: f.target.is_hybrid_swa,
        "The target {f.args.model_path} has sliding-window layers, whose slots the draft lacks.",
        IN_ONE,
    ),
)


def check_disaggregation(facts: DraftFacts) -> None:
    """Raise `Refusal` for what servers that only prefill, or only decode, cannot serve exactly."""
    if facts.args.disaggregation_mode != "null":
        refuse(RULES, facts)


def keep_radix_cache(original: Callable[..., None], server_args: Any) -> None:
    """AROUND `handle_pd_disaggregation`: a decode server may have a radix cache.

    SGLang refuses it for speculation, because its own workers lack draft KV of a prefix. Here the
    slots of a prefix have KV of both.
    """
    if not server_args.disaggregation_decode_enable_radix_cache:
        return original(server_args)
    with temporarily(server_args, speculative_algorithm=None):
        return original(server_args)


def own_all_slots(resumed: list[Any], queue: Any, *_: Any) -> None:
    """AFTER `DecodePreallocQueue.resume_retracted_reqs`: a resumed request has no cached prefix.

    All its slots are new. SGLang would look for a prefix, and count slots of the cache as its own.
    """
    if queue.scheduler.server_args.disaggregation_decode_enable_radix_cache:
        for req in resumed:
            req.last_node = queue.tree_cache.root_node


@cache
def checkpoint_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's config and weights, read once."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with open_file(file) as stream:
            while read := stream.read(READ_AT_ONCE):
                digest.update(read)
    return digest.hexdigest()


def sent_kv(server_args: Any) -> dict[str, object]:
    """What both servers of a pair must have alike, by the name that a message gives it.

    SGLang itself compares page sizes and `--kv-cache-dtype`.
    """
    return {
        "draft": checkpoint_digest(Path(draft_config(server_args).path)),
        "block size": server_args.speculative_num_draft_tokens,
        "attention TP size": attention_tp_size(server_args),
        "dtype": str(server_args.get_model_config().dtype).removeprefix("torch."),
    }


def keep_description(_: None, bootstrap: Any) -> None:
    """AFTER `CommonKVBootstrapServer._setup_routes`: it passes on what a prefill server has."""
    described: dict[str, object] = {}

    async def put(request: web.Request) -> web.Response:
        described.update(await request.json())
        return web.Response()

    async def get(request: web.Request) -> web.Response:
        return web.json_response(described, status=200 if described else 404)

    bootstrap.app.router.add_put(ROUTE, put)
    bootstrap.app.router.add_get(ROUTE, get)


def describe(_: None, manager: Any) -> None:
    """AFTER `CommonKVManager.register_to_bootstrap`, with the same address."""
    host = manager.bootstrap_host
    if manager.dist_init_addr:
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    url = NetworkAddress(host, manager.bootstrap_port).to_url() + ROUTE
    try:
        requests.put(url, json=sent_kv(manager.server_args), timeout=SECONDS).raise_for_status()
    except requests.RequestException as error:
        logger.error("No decode server will take requests of this one (%s).", error)


def meet(
    original: Callable[..., tuple[dict[str, Any], list[Any]]],
    queue: Any,
    waiting: dict[str, list[Any]],
) -> tuple[dict[str, Any], list[Any]]:
    """AROUND `DecodePreallocQueue._ensure_prefill_info`: meet each prefill server, by address.

    Requests of one that does not fit end with an error. SGLang raises where page sizes or dtypes
    differ, which would end the scheduler. It forgets the address of a server that has died.
    """
    ready: dict[str, Any] = {}
    later: list[Any] = []
    for address, of_it in waiting.items():
        alive = [each for each in of_it if each.kv_receiver.conclude_state != KVPoll.Failed]
        is_new, differs = address not in queue.kv_manager.prefill_info_table, ""
        try:
            now, not_yet = original(queue, {address: alive})
            if now and is_new:
                differs = _difference(queue, address)
        except (AssertionError, RuntimeError) as error:
            differs = str(error)
        if differs:
            _fail(queue, alive, differs)
            _forget(queue.kv_manager, address)
        else:
            ready |= now
            later += not_yet
    return ready, later


def _difference(queue: Any, address: str) -> str:
    """What a prefill server has otherwise, as a sentence. Empty: nothing."""
    try:
        answer = requests.get(f"http://{address}{ROUTE}", timeout=SECONDS)
        there = answer.json() if answer.ok else {}
    except requests.RequestException as error:
        return f"The prefill server {address} does not say which draft it has ({error})."
    if answer.status_code == 404:
        return f"The prefill server {address} has no DFLASH draft, whose KV this server needs."
    for name, value in sent_kv(queue.scheduler.server_args).items():
        if there.get(name) != value:
            return (
                f"The prefill server {address} has {name} {there.get(name)}, and this server has "
                f"{value}. Give both the same."
            )
    return ""


def _forget(manager: Any, address: str) -> None:
    """As SGLang forgets a server that has died. Another one may come to its address."""
    with manager.connection_lock:
        manager.prefill_info_table.pop(address, None)
        for key in list(manager.connection_pool):
            if key.startswith(f"{address}_"):
                del manager.connection_pool[key]


def _fail(queue: Any, waiting: Iterable[Any], why: str) -> None:
    """End these requests, at SGLang's next poll, and on the prefill server if it is known."""
    for each in waiting:
        receiver, room = each.kv_receiver, each.req.bootstrap_room
        rank = queue._resolve_prefill_dp_rank(each.req)
        if rank is not None:
            receiver.init(rank)
            receiver.abort()
        queue.kv_manager.record_failure(room, why)
        queue.kv_manager.update_status(room, KVPoll.Failed)
        receiver.conclude_state = KVPoll.Failed


def count_buffers(ready: bool, queue: Any, req: Any) -> bool:
    """AFTER `PrefillBootstrapQueue.finalize_bootstrap`: nothing is sent to other buffers.

    As to a decode server without a draft. The request ends with an error, on both servers.
    """
    manager, room = req.disagg_kv_sender.kv_mgr, req.bootstrap_room
    ours = len(manager.kv_args.kv_data_ptrs)
    for session, info in manager.transfer_infos.get(room, {}).items():
        theirs = len(manager.decode_kv_args_table[session].dst_kv_ptrs)
        if theirs == ours:
            continue
        why = (
            f"The decode server has {theirs} buffers of KV, and this server has {ours}. Both must "
            "serve the same target with the same draft."
        )
        logger.error(why)
        manager.record_failure(room, why)
        manager.update_status(room, KVPoll.Failed)
        to, rank = (info.endpoint, info.dst_port), manager.attn_tp_rank
        manager.sync_status_to_decode_endpoint(*to, room, KVPoll.Failed, rank)
    return ready
