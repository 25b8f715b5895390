"""SGLang's CUDA graphs of draft and target: their inputs, and the memory that they share."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from transformers import AutoModelForCausalLM

from sglang_dflash.settings.options import DRAFT_AHEAD, FEATURES, VERIFY_WIDTH
from sglang_dflash.trainer.hooks import FOLDER
from test.checkpoints import prompt, write_draft
from test.cuts import verify_parts
from test.features import WANTED, check, read
from test.precision import HIDDEN_STATE_BOUND
from test.rehearsal.device.memory import Recording
from test.rehearsal.mutation import Change, mutate
from test.rehearsal.serving import (
    Asked,
    N,
    all_kinds,
    answer,
    assert_drafts,
    assert_exact,
    engine,
    recorded,
    serve,
    served,
    small_draft,
)

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def asked(small: Path) -> dict[str, Asked]:
    return answer(small, all_kinds())


@pytest.fixture(params=["on", pytest.param("off", marks=pytest.mark.full)])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With draft-ahead, the draft's graph runs between a verify and the readers of its result."""
    monkeypatch.setenv(DRAFT_AHEAD, request.param)


def test_padded_batches(
    small: Path, asked: dict[str, Asked], monkeypatch: pytest.MonkeyPatch, ahead: None
) -> None:
    """Each batch runs in a larger graph, whose other rows hold values of the last batch."""
    replay, replayed = CudaGraphRunner.replay, set()

    def watched(graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = replay(graphs, batch, *args, **kwargs)
        replayed.add((graphs.bs, batch.batch_size))
        return result

    monkeypatch.setattr(CudaGraphRunner, "replay", watched)
    with engine(small, "fa3", cuda_graph_bs=[4]) as run:
        reqs = serve(run, asked)
    assert replayed == {(4, count) for count in (1, 2, 3, 4)}
    assert_exact(reqs, asked)


@pytest.mark.parametrize(("width", "backend"), [("5", "fa3"), ("auto", "flashinfer")])
def test_widths_with_graphs_of_their_own(
    small: Path,
    asked: dict[str, Asked],
    monkeypatch: pytest.MonkeyPatch,
    ahead: None,
    width: str,
    backend: str,
) -> None:
    """FlashInfer plans on the host, which knows no other lengths than equal ones."""
    monkeypatch.setenv(VERIFY_WIDTH, width)
    used, turns = set(), itertools.cycle([2, 8, 4, 6])
    replay = CudaGraphRunner.replay

    def watched(graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not graphs.model_runner.is_draft_worker:
            used.add((graphs.num_tokens_per_bs, batch.spec_info.draft_token_num))
            assert graphs.model_runner.attn_backend is graphs.attn_backend
        return replay(graphs, batch, *args, **kwargs)

    monkeypatch.setattr(CudaGraphRunner, "replay", watched)
    with engine(small, backend) as run:
        if width == "auto":
            verify_parts(run.worker, lambda block: block.first(next(turns)))
        timed = set(used)  # at startup
        used.clear()
        reqs = serve(run, asked)
    assert_exact(reqs, asked)
    assert used == {(w, w) for w in ([5] if width == "5" else [2, 4, 6, 8])}
    assert timed == (set() if width == "5" else used)


def states(small: Any, **flags: Any) -> list[Any]:
    """The states of the last layer that a client gets."""
    with engine(small, "fa3", enable_return_hidden_states=True, **flags) as run:
        reqs = [run.add(prompt(980 + i, 9), **N, return_hidden_states=True) for i in range(2)]
        run.run(*reqs)
    return [torch.tensor(state) for req in reqs for state in req.hidden_states[1:]]


def same_states(small: Any) -> None:
    expected = states(small, draft=False, disable_cuda_graph=True, disable_radix_cache=True)
    torch.testing.assert_close(
        torch.stack(states(small)), torch.stack(expected), atol=HIDDEN_STATE_BOUND, rtol=0
    )


def test_hidden_states_of_a_narrow_verify(
    small: Path, monkeypatch: pytest.MonkeyPatch, ahead: None
) -> None:
    """They are read after the draft's graph has written to memory that both graphs share."""
    monkeypatch.setenv(VERIFY_WIDTH, "4")
    same_states(small)


def test_hidden_states_left_in_the_graphs_memory(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: no copy of them is kept."""
    monkeypatch.setenv(VERIFY_WIDTH, "4")
    verify = "step.verify:Verifier._verify"
    mutate(monkeypatch, verify, "output.hidden_states.clone()", "output.hidden_states")
    with pytest.raises(AssertionError):
        same_states(small)


def test_new_weights_in_the_graphs_memory(small: Path, tmp_path: Path) -> None:
    """Graphs that were captured with a draft's old weights run the new ones."""
    config, weights = small_draft()
    new = write_draft(tmp_path / "new", config, weights)
    write_draft(tmp_path / "draft", config, {name: w.flip(0) for name, w in weights.items()})
    (tmp_path / "target").symlink_to(small / "target")
    asked = answer(small, {"one": Asked(prompt(986, 12), N), "two": Asked(prompt(987, 30), N)})
    with engine(tmp_path, "fa3") as run:
        request = UpdateWeightFromDiskReqInput("", manifest={FOLDER: str(new)})
        done = run.scheduler.weight_updater.update_weights_from_disk(request)
        assert done.success, done.message
        drafts = recorded(run)
        reqs = serve(run, asked)
    assert_exact(reqs, asked)
    assert_drafts(small, reqs, drafts)


def test_features_out_of_graphs(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken before the draft's graph writes to memory that both graphs share."""
    monkeypatch.setenv(FEATURES, str(tmp_path))
    asked = answer(small, {"one": Asked(prompt(988, 12), N)})
    asked["one"].options = N | WANTED
    with engine(small, "fa3") as run:
        reqs = serve(run, asked)
    assert_exact(reqs, asked)
    req = reqs["one"]
    model = AutoModelForCausalLM.from_pretrained(small / "target").float().eval()
    ids, output = list(req.origin_input_ids), list(req.output_ids)
    check(model, read(tmp_path, req.rid), ids, output, layers=(1, 2))


def test_context_kv_comes_before_the_next_draft(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: the next draft replays first, and overwrites the states for the context KV."""
    asked = answer(small, {"one": Asked(prompt(985, 12), N)})
    context = "self._write_context(verified, batch)"
    draft = "following = self.next_draft.after_verify(batch, verified, copy)"
    decode = "step.worker:DFlashWorker.launch"
    mutate(monkeypatch, decode, f"{context}\n    {draft}", f"{draft}\n    {context}")
    reqs, drafts = served(small, asked, "fa3")
    with pytest.raises(AssertionError):
        assert_drafts(small, reqs, drafts)


def test_nothing_is_kept_for_a_backward_pass(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang captures with gradients enabled. Their graph would keep every activation."""
    assert not gradients(small, monkeypatch)


def test_gradients_are_seen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation: the draft's forward without its `no_grad`."""
    mutate(monkeypatch, "model.draft:DFlashDraftModel.forward", "@torch.no_grad()", "")
    assert gradients(small, monkeypatch)


def gradients(small: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether any call that makes a tensor is captured with gradients enabled."""
    enabled, add = set(), Recording.add

    def watched(recording: Recording, launch: Any, made: list[Any]) -> None:
        if made:
            enabled.add(torch.is_grad_enabled())
        add(recording, launch, made)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "add", watched)
        with engine(small, "fa3", cuda_graph_bs=[4]):
            pass
    return True in enabled


AGREED = "model.lm_head:Vocabulary._reduce_over_ranks"
REFUSED = [
    ("step.propose:Drafter._propose", "anchors, seq_lens, rows", "anchors, seq_lens_cpu, rows"),
    (AGREED, "index, value, sum_exp = found", "index, value, sum_exp = found; int(index[0, 0])"),
    (
        AGREED,
        "index, value, sum_exp = found",
        "index, value, sum_exp = found; value[value > 0].sum()",
    ),
]
NAMES = ["a host tensor", "a value in a graph", "a mask in a graph"]


@pytest.mark.parametrize("mutation", REFUSED, ids=NAMES)
def test_what_the_device_refuses(
    small: Path, monkeypatch: pytest.MonkeyPatch, mutation: Change
) -> None:
    """Mutations: each ends the server, as it would on a GPU."""
    mutate(monkeypatch, *mutation)
    asked = answer(small, {"one": Asked(prompt(1, 5), N)})
    with pytest.raises(Exception, match=r"given the host tensor|while a graph is captured"):
        served(small, asked, "fa3", cuda_graph_bs=[2])


STALE = [
    (
        "backends.fa3:begin_forward",
        "cache_seqlens_int32.dflash_schedules = {}",
        "cache_seqlens_int32.__dict__.setdefault('dflash_schedules', {})",
    ),
    ("backends.fa3:share_schedules", '"causal": given["causal"]', '"causal": True'),
    ("backends.fa3:share_schedules", "table.shape[1] * k.shape[1]", "k.shape[1]"),
]


@pytest.mark.parametrize("mutation", STALE, ids=["of a warm-up", "of the target", "of a page"])
def test_a_schedule_of_another_forward_is_seen(
    small: Path, monkeypatch: pytest.MonkeyPatch, mutation: Change
) -> None:
    """Mutations: attention gets a schedule for other work than it has."""
    asked = answer(small, {"one": Asked(prompt(1, 5), N)})
    mutate(monkeypatch, *mutation)
    with pytest.raises(Exception, match="a schedule of other lengths"):
        served(small, asked, "fa3", cuda_graph_bs=[2])


def test_logits_of_half_precision(small: Path) -> None:
    """They are in SGLang's float32 buffer, in their own dtype. Each draw is their argmax."""
    with engine(small, "fa3", dtype="bfloat16") as run:
        verify, seen = run.worker.verifier.verify, []

        def watched(batch: Any, block: Any) -> Any:
            verified = verify(batch, block)
            logits = verified.output.next_token_logits
            drawn = verified.accepted.outcome.sampled.flatten()
            seen.append((logits.dtype, torch.equal(drawn.cpu(), logits.argmax(-1).cpu())))
            return verified

        run.worker.verifier.verify = watched
        reqs = [run.add(prompt(987 + i, 9), **N) for i in range(3)]
        run.run(*reqs)
    assert len(seen) >= 3
    assert set(seen) == {(torch.bfloat16, True)}
