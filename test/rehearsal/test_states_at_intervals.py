"""Hybrid targets with `extra_buffer`: the radix cache gets states at intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.settings.options import VERIFY_WIDTH
from test.checkpoints import prompt
from test.forced import Forced, put_drafter
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import AT_INTERVALS, Asked, answer, engine, serve, write_hybrid_pair

pytestmark = pytest.mark.ci

N = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_pair(tmp_path_factory.mktemp("hybrid"))


# prompt tokens, tokens of the first turn, and how many of both the second turn finds in the cache
TURNS = [
    (20, 3, 0),  # no multiple of 8 is passed while decoding
    (20, 5, 24),  # a turn that ends on one, inside its accepted drafts
    (20, 6, 24),
    (16, 4, 0),  # one that begins on one
    (70, 2, 64),  # a prefill stores the state behind its last whole chunk of 64
]
FEW = [TURNS[1], TURNS[4]]
TURNS_OF_16 = [(28, 4, 0), (28, 5, 32), (28, 6, 32), (32, 4, 0), (70, 2, 64)]


def turns_at_intervals(
    pair: Path, page: int = 1, turns: list[tuple[int, int, int]] = TURNS
) -> None:
    """Second turns continue from the last multiple that their first turn passed.

    All drafts are right, so a first turn at full width is one block, and ends inside its accepted
    drafts.
    """
    interval = 8 if page == 1 else 16
    prompts = [prompt(980 + i, length) for i, (length, _, _) in enumerate(turns)]
    whole = answer(pair, {str(i): Asked(ids, N) for i, ids in enumerate(prompts)})
    flags = AT_INTERVALS | {"mamba_track_interval": interval, "page_size": page}
    with engine(pair, "triton", cuda_graph_bs=[4], **flags) as run:
        drafts = Forced(run.worker.drafter, lambda _: 7)
        put_drafter(run.worker, drafts)

        def say(ids: list[int], expected: list[int], tokens: int) -> Any:
            req = run.add(ids, max_new_tokens=tokens, ignore_eos=True)
            drafts.truth[req.rid] = expected
            run.run(req)
            assert list(req.output_ids) == expected[:tokens]
            return req

        hits = []
        for one, (_, end, _) in zip(whole.values(), turns, strict=True):
            said = one.answer["ids"]
            say(one.ids, said, end)
            hits.append(say(one.ids + said[:end], said[end:], 8 - end).cached_tokens)
    assert hits == [hit for _, _, hit in turns]


@pytest.mark.parametrize(
    ("page", "width", "turns"),
    [
        (1, "full", FEW),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (1, "full", TURNS),
                (16, "full", TURNS_OF_16),
                (1, "3", TURNS),
                (16, "auto", TURNS_OF_16),
            ]
        ),
    ],
)
def test_turns_at_intervals(
    pair: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    width: str,
    turns: list[tuple[int, int, int]],
) -> None:
    monkeypatch.setenv(VERIFY_WIDTH, width)
    turns_at_intervals(pair, page, turns)


@pytest.mark.full
def test_retraction_at_intervals(pair: Path) -> None:
    """KV runs out, and there are few states, too. Second turns hit what is left of them."""
    longer = N | {"max_new_tokens": 30}
    whole = answer(pair, {str(i): Asked(prompt(985 + i, 20), longer) for i in range(4)})
    turns: list[dict[str, Asked]] = [{}, {}]
    for name, one in whole.items():
        said = one.answer["ids"]
        for turn, (begin, end) in zip(turns, [(0, 24), (24, 30)], strict=True):
            options = N | {"max_new_tokens": end - begin}
            turn[name] = Asked(one.ids + said[:begin], options, {"ids": said[begin:end]})
    flags = AT_INTERVALS | {"max_mamba_cache_size": 12}
    crowded: dict[str, Any] = {"max_total_tokens": 168, "schedule_conservativeness": 0.01}
    with engine(pair, "triton", cuda_graph_bs=[4], **flags, **crowded) as run:
        states, drafter = run.rows.mamba_allocator, run.worker.drafter
        free = states.available_size(), run.allocator.available_size()
        first = serve(run, turns[0], apart=0)
        put_drafter(run.worker, drafter)
        second = serve(run, dict(reversed(turns[1].items())), apart=7)
        run.scheduler.flush_cache()
        assert (states.available_size(), run.allocator.available_size()) == free
    for turn, reqs in zip(turns, [first, second], strict=True):
        for name, req in reqs.items():
            assert list(req.output_ids) == turn[name].answer["ids"]
    assert sum(req.retraction_count for req in first.values()) > 0
    assert any(req.cached_tokens == 40 for req in second.values())


OF_INTERVALS: list[Change] = [
    ("targets.recurrent_states:tokens_to_interval", "length % interval", "length % interval - 1"),
    ("step.commit:Committer._commit", "[count - 1 for count in num_committed]", "step.accepted"),
]


@pytest.mark.full
@pytest.mark.parametrize("change", OF_INTERVALS, ids=lambda change: change[0])
def test_mutations_of_intervals_are_seen(
    pair: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    mutate(monkeypatch, *change)
    with pytest.raises(AssertionError):
        turns_at_intervals(pair)
