"""Hook functions that serve every release. The hook table of each one names them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from copy import copy
from typing import Any

from transformers import Qwen3Config

from sglang_dflash.checkpoint.served import is_draft, load_draft
from sglang_dflash.errors import Refusal
from sglang_dflash.logits.processors import wrong_processor
from sglang_dflash.seam import release
from sglang_dflash.seam.flags import process_serves_dflash
from sglang_dflash.trainer.features import ask

NEXT_SEED = 0x1E3779B97F4A7C15  # an odd number, so that no seed comes again

GONE = re.compile(r"gloo/transport/tcp/\S+ (.*(?:Connection|Broken pipe).*)")
RANK_GONE = "Another rank of this server is gone, so this one ends ({}). Its own log may say why."


def validate_request(req: Any) -> str | None:
    """REPLACE `validate_dflash_request`: why a request cannot be served exactly, or None.

    Tokens outside the vocabulary crash SGLang's scheduler with an index error. In a session, SGLang
    has put numbers outside of it in the place of images, and keeps the client's own tokens.
    """
    params = req.sampling_params
    if params.min_p > 0 and release.server_args().enable_deterministic_inference:
        return (
            "SGLang has no seeded draw with min_p. Leave min_p out, or start the server without "
            "--enable-deterministic-inference."
        )
    if req.custom_logit_processor:
        why = wrong_processor(req.custom_logit_processor)
        if why is not None:
            req.custom_logit_processor = None  # the refused request, too, becomes part of a batch
            return why
    tokens = {
        "input_ids": req.origin_input_ids_unpadded,
        "token_ids_logprob": req.logprob.token_ids_logprob,
    }
    for field, ids in tokens.items():
        if ids and not 0 <= min(ids) <= max(ids) < req.vocab_size:
            req.origin_input_ids_unpadded = req.origin_input_ids[:0]  # the detokenizer reads them
            return f"{field} has a token outside the vocabulary of {req.vocab_size} tokens."
    return ask(req, release.server_args().dflash.features)


def seed_answers_apart(manager: Any, request: Any) -> None:
    """BEFORE `TokenizerManager._send_one_request`: the `n` answers to a request have other seeds.

    SGLang sends a copy of the request for each, and all copies share their sampling parameters. The
    one that is sent keeps a copy of them, and the next one finds the next seed.
    """
    params = getattr(request, "sampling_params", None)
    if params is None or params.n == 1 or not isinstance(params.sampling_seed, int):
        return
    if not release.server_args().enable_deterministic_inference:  # there, all draws are SGLang's
        request.sampling_params = copy(params)
        params.sampling_seed = (params.sampling_seed + NEXT_SEED) % 2**63


def get_config(original: Any, model: str, *args: Any, **kwargs: Any) -> Any:
    """AROUND `get_config`: for a DFlash draft, make the config from this package's reading."""
    if not is_draft(model, kwargs.get("revision")):
        return original(model, *args, **kwargs)
    config, _ = load_draft(model, kwargs.get("revision"))
    hf_config = Qwen3Config(**config.hf_config())
    hf_config.dflash_path = config.path
    return hf_config


def get_generation_config(original: Any, model: str, *args: Any, **kwargs: Any) -> Any:
    """AROUND `get_generation_config`: a DFlash draft has none."""
    if is_draft(model, kwargs.get("revision")):
        return None
    return original(model, *args, **kwargs)


def text_of_an_exception(original: Callable[[], str]) -> str:
    """AROUND `get_exception_traceback`: a refusal is one paragraph, without the traceback.

    So is the end of another rank, which gloo reports where this one waits for it.
    """
    error = sys.exception()
    if isinstance(error, Refusal):
        return f"sglang-dflash: {error}"
    lost = GONE.search(str(error)) if isinstance(error, RuntimeError) else None
    if lost and process_serves_dflash():
        return f"sglang-dflash: {RANK_GONE.format(lost[1])}"
    return original()
