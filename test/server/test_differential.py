"""Random requests, every field of every answer: `python -m test.differential` under pytest."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from test import releases
from test.checkpoints import write_latent_pair
from test.differential.ask import Report, compare
from test.server.conftest import on
from test.servers import (
    ADAPTERS,
    AHEAD,
    ALL_FEATURES,
    ANY_ROWS,
    Client,
    running,
    with_adapters,
    without_speculation,
)

COMPARED = 40
SEEDS = {"auto": 12, "page 16, ahead": 11}
SMALL = ("--chunked-prefill-size", "32", "--max-total-tokens", "3072")
CROSS = {
    f"page {page}, TP {tp}, {'small' if small else 'ample'}": (
        *("--page-size", page, "--tp-size", tp),
        *(SMALL + AHEAD if small else ()),
    )
    for page, tp, small in product(("1", "16"), ("1", "2"), (False, True))
}


def check(report: Report, compared: int) -> None:
    assert report.compared + report.left_out == compared
    assert report.left_out <= (0 if releases.OWN_STEP else compared // 5)
    assert len(report.features) > 25, report.features
    differing = [f"{r.number} {r.features}: {why}" for r, why in report.differing]
    assert not differing, "\n".join(differing)  # a text, because pytest cuts lists off


@on(*SEEDS)
def test_random_requests(server: Client, reference: Client, request: pytest.FixtureRequest) -> None:
    seed = SEEDS[request.node.callspec.params["server"]]
    check(compare(seed, range(COMPARED), reference.url, server.url), COMPARED)


@pytest.mark.skipif(not releases.OWN_STEP, reason="SGLang's own worker verifies whole blocks")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.ci),
        pytest.param(CROSS["page 16, TP 2, small"], marks=pytest.mark.full),
    ],
    ids=["page 1", "page 16, TP 2, small"],
)
def test_random_requests_with_any_rows(flags: tuple[str, ...], reference: Client) -> None:
    """Each step verifies any number of rows, and any of its requests."""
    with running(*ALL_FEATURES, *flags, dflash=True, environment={ANY_ROWS: "5"}) as server:
        check(compare(14, range(COMPARED), reference.url, server.url), COMPARED)
        counts = server.generate("def add(", max_new_tokens=80, ignore_eos=True)["meta_info"]
    assert counts["spec_num_proposed_drafts"] < 15 * counts["spec_verify_ct"]


@pytest.mark.parametrize(
    ("flags", "compared"),
    [
        pytest.param((), COMPARED, marks=pytest.mark.ci),
        pytest.param(("--page-size", "16", *SMALL, *AHEAD), 100, marks=pytest.mark.full),
    ],
)
def test_random_requests_with_adapters(
    tmp_path: Path, flags: tuple[str, ...], compared: int
) -> None:
    """Each request has one of two LoRA adapters, or none, and each step verifies any rows."""
    both = with_adapters(tmp_path)
    environment = {ANY_ROWS: "7"} if releases.OWN_STEP else {}
    dflash = running(*ALL_FEATURES, *both, *flags, dflash=True, environment=environment)
    with without_speculation(*both) as plain, dflash as server:
        report = compare(13, range(compared), plain.url, server.url, adapters=tuple(ADAPTERS))
    check(report, compared)


@pytest.mark.full
def test_random_requests_of_latent_attention(tmp_path: Path) -> None:
    """A random MLA target with experts. Hardly a draft is right, so each step rejects a block."""
    target, draft = write_latent_pair(tmp_path)
    both = "--model-path", str(target)
    flags = *CROSS["page 16, TP 2, small"], "--speculative-draft-model-path", str(draft)
    dflash = running(*ALL_FEATURES, *both, *flags, dflash=True)
    with without_speculation(*both) as plain, dflash as server:
        check(compare(6, range(100), plain.url, server.url), 100)


@pytest.mark.full
@pytest.mark.parametrize("name", CROSS)
def test_random_requests_crossed(reference: Client, name: str) -> None:
    seed = 100 + list(CROSS).index(name)
    with running(*ALL_FEATURES, *CROSS[name], dflash=True) as server:
        check(compare(seed, range(150), reference.url, server.url), 150)
