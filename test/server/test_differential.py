"""Random requests, every field of every answer: `python -m test.differential` under pytest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from test.differential import SERVER_FLAGS, Report, compare, draw, reference, seeded
from test.server.conftest import FULL, Client, running

SMALL = ["--chunked-prefill-size", "32", "--max-total-tokens", "3072"]
AHEAD = ["--speculative-dflash-draft-ahead", "on"]
CI = {
    "page 1, auto": ["--speculative-dflash-verify-width", "auto"],
    "page 16, full, ahead": ["--page-size", "16", *FULL, *AHEAD],
}
CROSS = {
    f"page {page}, TP {tp}, {'small' if small else 'ample'}": [
        *("--page-size", page, "--tp-size", tp),
        *(SMALL + AHEAD if small else []),
    ]
    for page, tp, small in product(("1", "16"), ("1", "2"), (False, True))
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Client]:
    with reference() as client:
        yield client


def compared(plain: Client, flags: list[str], count: int, seed: int) -> Report:
    asked = [seeded(draw(number, seed), seed) for number in range(count)]
    with running(*SERVER_FLAGS, *flags, dflash=True) as server:
        return compare(asked, plain.url, server.url)


@pytest.mark.parametrize("name", CI)
def test_random_requests(plain: Client, name: str) -> None:
    report = compared(plain, CI[name], 150, seed=10 + list(CI).index(name))
    assert report.compared == 150
    assert len(report.features) > 25, report.features
    assert not report.differing, [(r.number, r.features, why) for r, why in report.differing]


@pytest.mark.full
@pytest.mark.parametrize("name", CROSS)
def test_random_requests_crossed(plain: Client, name: str) -> None:
    report = compared(plain, CROSS[name], 100, seed=100 + list(CROSS).index(name))
    assert report.compared == 100
    assert not report.differing, [(r.number, r.features, why) for r, why in report.differing]
