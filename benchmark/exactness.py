"""Compares greedy answers with DFLASH with those without speculation.

In fp32 every answer must be equal. In bf16, a forward of one row and a forward of many rows round
differently. So two answers may differ from a place on where two tokens are nearly equally likely.
Each such place is shown with the target's own margin, in nats, between the two chosen tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import requests

from benchmark import machine
from benchmark.load import accept_length_of
from benchmark.sides import add_axes, add_server_options, make_side, serving
from benchmark.workloads import bundled
from sglang_dflash.tools.launch import ServerFailed, interrupt_on_signals

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NEAR_TIE = 0.25  # nats: two units of a logit of bf16 between 16 and 32; chosen, not derived


def answers(url: str, prompts: list[str], max_tokens: int, logprobs: bool) -> list[dict[str, Any]]:
    body: dict[str, Any] = {
        "text": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
    }
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 5}
    answer = requests.post(f"{url}/generate", json=body, timeout=1800)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()
    return found


def parting(ours: dict[str, Any], target: dict[str, Any]) -> dict[str, Any] | None:
    """The first place where two answers differ, and the target's margin. None if they are equal."""
    if ours["output_ids"] == target["output_ids"]:
        return None
    pairs = zip(ours["output_ids"], target["output_ids"], strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:  # one is a prefix of the other
        return {"position": min(len(ours["output_ids"]), len(target["output_ids"]))}
    logprob = {
        token: value for value, token, _ in target["meta_info"]["output_top_logprobs"][position]
    }
    chosen, other = target["output_ids"][position], ours["output_ids"][position]
    margin = logprob[chosen] - logprob[other] if other in logprob else None
    return {"position": position, "target": chosen, "ours": other, "margin": margin}


def is_near_tie(parted: dict[str, Any], bound: float) -> bool:
    margin = parted.get("margin")
    return margin is not None and margin < bound


def compare(args: argparse.Namespace) -> dict[str, Any]:
    per_kind = args.prompts // 3
    asked = [p for kind in ("word", "json", "code") for p in bundled(kind, per_kind, args.seed)]
    prompts = [CHAT.format(p.text) if p.chat else p.text for p in asked]
    sides = [make_side(name, args) for name in ("none", "ours")]
    with serving(sides) as servers:
        target = answers(servers["none"].url, prompts, args.max_tokens, logprobs=True)
        ours = answers(servers["ours"].url, prompts, args.max_tokens, logprobs=False)
    places = [parting(a, b) for a, b in zip(ours, target, strict=True)]
    parted = [{"prompt": i, **place} for i, place in enumerate(places) if place is not None]
    bound = 0.0 if args.dtype == "float32" else args.near_tie
    return {
        "dtype": args.dtype,
        "attention_backend": args.attention_backend,
        "page_size": args.page_size,
        "prompts": len(prompts),
        "tokens": sum(len(answer["output_ids"]) for answer in target),
        "accept_length": accept_length_of([answer["meta_info"] for answer in ours]),
        "identical": len(prompts) - len(parted),
        "near_ties": sum(is_near_tie(place, bound) for place in parted),
        "parted": parted,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.exactness", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--near-tie", type=float, default=NEAR_TIE, help="nats, if not fp32")
    add_server_options(parser)
    add_axes(parser, several=False)
    args = parser.parse_args(argv)
    interrupt_on_signals()
    try:
        result = compare(args)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    result |= {"hardware": machine.hardware(), "versions": machine.versions()}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key not in ("hardware", "versions")})
    return 0 if result["identical"] + result["near_ties"] == result["prompts"] else 1


if __name__ == "__main__":
    sys.exit(main())
