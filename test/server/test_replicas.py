"""Two replicas of a server (`--dp-size`): what they draw is told apart."""

from __future__ import annotations

import pytest

from test.servers import running

PROMPT = "def main(args):\n"


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
