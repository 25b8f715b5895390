"""Replicas on servers of their own: SGLang's data-parallel controller is never idle."""

from __future__ import annotations

import pytest

from test.chaos.deaths import REPLICAS, killed_part_of_replicas
from test.differential.ask import compare
from test.server.test_differential import COMPARED, check
from test.servers import ALL_FEATURES, Client, running

PROMPT = "def main(args):\n"
IN_CI = "data_parallel_controller", "scheduler_DP1"


@pytest.mark.ci
def test_replicas_draw_apart() -> None:
    """Requests go to them in turn, so that both have seen as many when they draw."""
    with running("--dp-size", "2", dflash=True) as server:
        answers = set()
        for _ in range(3):
            prompts = [PROMPT] * 4
            drawn = server.generate_many(
                prompts, temperature=1.5, max_new_tokens=24, ignore_eos=True
            )
            answers |= {tuple(answer["output_ids"]) for answer in drawn}
        assert len(answers) == 12
        seeded = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 5, "n": 4}
        asked = server.post("/generate", {"text": PROMPT, "sampling_params": seeded}).json()
        assert len({tuple(answer["output_ids"]) for answer in asked}) == 4


@pytest.mark.ci
def test_random_requests(reference: Client) -> None:
    with running(*ALL_FEATURES, "--dp-size", "2", dflash=True) as server:
        check(compare(16, range(COMPARED), reference.url, server.url), COMPARED)


@pytest.mark.parametrize(
    "title",
    [pytest.param(t, marks=pytest.mark.ci if t in IN_CI else pytest.mark.full) for t in REPLICAS],
)
def test_the_death_of_a_process_ends_the_server(title: str) -> None:
    killed_part_of_replicas(title)
