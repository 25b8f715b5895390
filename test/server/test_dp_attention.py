"""Servers with DP attention: two replicas share a target's MLPs and experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.tiny.prompts import held_out
from test.chaos.deaths import killed
from test.checkpoints import write_latent_pair
from test.differential.ask import compare
from test.fleet import assert_each_counts_its_steps, described_replicas
from test.server.test_differential import COMPARED, SMALL, check
from test.servers import AHEAD, ALL_FEATURES, FULL, Client, chat, running, without_speculation

pytestmark = pytest.mark.ci
REPLICAS = ("--dp-size", "2", "--enable-dp-attention", *FULL)
TWO = ("--tp-size", "2", *REPLICAS)
FOUR = ("--tp-size", "4", *REPLICAS)  # attention TP 2


def test_random_requests(reference: Client) -> None:
    with running(*ALL_FEATURES, *TWO, *SMALL, dflash=True) as server:
        check(compare(17, range(COMPARED), reference.url, server.url), COMPARED)


@pytest.mark.full
def test_each_is_described_and_counts_its_steps() -> None:
    with running(*TWO, "--enable-metrics", dflash=True) as server:
        assert [each["dp_rank"] for each in described_replicas(server)] == [0, 1]
        assert_each_counts_its_steps(server)


def test_random_requests_of_replicas_of_two_ranks(tmp_path: Path) -> None:
    """Of a target with latent attention and experts, pages of 16 tokens, and drafts ahead."""
    target, draft = write_latent_pair(tmp_path)
    both = "--model-path", str(target)
    own = *FOUR, *SMALL, *AHEAD, "--page-size", "16", "--speculative-draft-model-path", str(draft)
    dflash = running(*ALL_FEATURES, *both, *own, dflash=True)
    with without_speculation(*both) as plain, dflash as server:
        check(compare(26, range(COMPARED), plain.url, server.url), COMPARED)


def test_drafts_are_those_of_one_rank() -> None:
    """In both replicas, of two ranks each."""
    prompts = [chat(example.prompt) for example in held_out("word", 4, seed=5)]
    found = []
    for flags in (FULL, FOUR):
        with running(*flags, dflash=True) as server:
            answers = server.generate_many(prompts, max_new_tokens=48)
            infos = [answer["meta_info"] for answer in answers]
            found.append([info["spec_accepted_per_position"] for info in infos])
    assert {info["dp_rank"] for info in infos} == {0, 1}
    assert found[0] == found[1]


@pytest.mark.full
def test_many_random_requests(reference: Client) -> None:
    with running(*ALL_FEATURES, *FOUR, dflash=True) as server:
        check(compare(19, range(200), reference.url, server.url), 200)


@pytest.mark.parametrize("title", ["scheduler_DP1_TP1"])
def test_the_death_of_a_replica_ends_the_server(title: str) -> None:
    killed(title, *TWO)
