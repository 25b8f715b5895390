"""`python -m test.differential --requests N --seed S [--family F | --hybrid | --mla] [--adapters]
[--plain | --itself | --builtin | --nodes | --router] [--pd] [--any-rows SEED]`

Draws random requests from a seed, asks a server without speculation one by one, asks a DFLASH
server the same in random company, and compares every field of every answer. A request that differs
is printed with its number; `--only NUMBER` replays it alone. `--itself` replaces the DFLASH server
by a second one without speculation, and so shows what company alone changes. `--plain` asks
a DFLASH server the same requests: both leave out seeded draws and what SGLang answers wrongly in
company (`is_served_by_sglang`). `--builtin` asks SGLang's own DFLASH, whose server ends if two
requests of a batch have a custom_logit_processor each (`--without` it). `--nodes` asks a server
over two nodes, and `--router` asks SGLang's router in front of two servers for what it keeps.
`--pd` does so in front of a server that prefills and one that decodes. With `--any-rows`, each step
verifies any rows of its batch. A run that compares nothing fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from test.checkpoints import write_latent_pair
from test.differential.ask import Report, compare
from test.differential.draw import Request, is_served_by_sglang
from test.fleet import is_kept, is_served_apart, prefill_and_decode, routed, two_nodes
from test.precision import FP32_KV, ROUNDED_KV
from test.servers import (
    ADAPTERS,
    ALL_FEATURES,
    ANY_ROWS,
    running,
    with_adapters,
    without_speculation,
)
from training import hybrid
from training.families import FAMILIES

BUILT_IN = "dflash_cpu,dflash_builtin_bench,forked"  # the last one is of the tests' servers
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def show(report: Report, seed: int) -> None:
    for request, found in report.differing:
        print(f"\nREQUEST {request.number} (seed {seed}) DIFFERS: {found}")
        print(f"  {request.path} {json.dumps(request.body)[:1500]}")
    differing = Counter(name for request, _ in report.differing for name in request.features)
    features = {name: [differing[name], n] for name, n in sorted(report.features.items())}
    print(json.dumps({"features": features, "of each": ["differing", "compared"]}))
    counts = {"compared": report.compared, "differing": len(report.differing)}
    print(json.dumps({"seed": seed, **counts}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m test.differential", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="replay these requests")
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="of both servers"
    )
    parser.add_argument("--family", choices=FAMILIES, help="of the draft; default: DFlash")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--hybrid", action="store_true", help="the target of training.hybrid")
    kind.add_argument("--mla", action="store_true", help="a random target with latent attention")
    parser.add_argument("--adapters", action="store_true", help="LoRA adapters")
    sides = parser.add_mutually_exclusive_group()
    sides.add_argument(
        "--plain", action="store_true", help="only requests that SGLang itself serves in company"
    )
    sides.add_argument("--itself", action="store_true", help="compare no speculation with itself")
    sides.add_argument("--builtin", action="store_true", help="SGLang's own DFLASH, not ours")
    sides.add_argument("--nodes", action="store_true", help="TP over two launches")
    sides.add_argument("--router", action="store_true", help="two servers behind SGLang's router")
    parser.add_argument("--pd", action="store_true", help="a prefill and a decode server")
    parser.add_argument("--any-rows", metavar="SEED", help="verify any rows, whatever pays")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="FEATURE", help="leave out requests with these"
    )
    arguments, flags = parser.parse_known_args()
    if arguments.itself and arguments.family:
        parser.error("--itself has no draft, so no --family")
    if arguments.nodes and (arguments.family or arguments.any_rows):
        parser.error("--nodes has the bundled draft, and verifies what pays")
    numbers = arguments.only or range(arguments.requests)
    names = tuple(ADAPTERS) if arguments.adapters else ()
    own: list[str] = []  # flags of the DFLASH server alone
    both = ["--kv-cache-dtype", arguments.kv_cache_dtype]
    bounds = FP32_KV if arguments.kv_cache_dtype == "auto" else ROUNDED_KV
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        if arguments.hybrid:
            both += ["--model-path", str(hybrid.assemble(folder)[0])]
        if arguments.mla:
            target, draft = write_latent_pair(folder)
            both += ["--model-path", str(target)]
            own += ["--speculative-draft-model-path", str(draft)]
        if names:
            both += with_adapters(folder)
        plain = stack.enter_context(without_speculation(*both))
        if arguments.itself:
            served = without_speculation(*both, *flags)
        else:
            ours = (*ALL_FEATURES, *both, *own, *flags)
            environment = {"SGLANG_PLUGINS": BUILT_IN} if arguments.builtin else {}
            if arguments.any_rows:
                environment[ANY_ROWS] = arguments.any_rows
            family = arguments.family
            served = running(*ours, dflash=True, environment=environment, family=family)
        if arguments.pd:
            given = ("--random-seed", "1", *both, *flags) if arguments.itself else ours
            environment = {} if arguments.itself else environment
            apart = prefill_and_decode(*given, dflash=not arguments.itself, environment=environment)
            url = stack.enter_context(stack.enter_context(apart).routed())
        elif arguments.nodes:
            url = stack.enter_context(two_nodes(*ours))[0].url
        else:
            url = stack.enter_context(served).url
        if arguments.router:
            second = running(*ours, dflash=True, environment=environment, family=family)
            url = stack.enter_context(routed(url, stack.enter_context(second).url))
        asks_plainly = arguments.plain or arguments.itself

        def wanted(request: Request) -> bool:
            left_out = bool(set(request.features) & set(arguments.without))
            left_out = left_out or (arguments.router and not is_kept(request))
            left_out = left_out or (arguments.pd and not is_served_apart(request))
            return not left_out and (is_served_by_sglang(request) or not asks_plainly)

        report = compare(arguments.seed, numbers, plain.url, url, bounds, names, wanted)
    show(report, arguments.seed)
    return 1 if report.differing or not report.compared else 0


if __name__ == "__main__":
    sys.exit(main())
