"""The draft always computes what the paper says, from the target's true hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from sglang_dflash.step import prefill
from sglang_dflash.step.copies import HostCopy
from test.checkpoints import (
    BLOCK,
    HIDDEN,
    draft_config,
    draft_weights,
    prompt,
    write_draft,
    write_target,
)
from test.inprocess import InProcess
from test.precision import HIDDEN_STATE_BOUND
from test.reference import Semantics, draft_block, features
from test.traces import draft_kv, record, trace
from test.worker.conftest import Alone, force


def test_drafts_equal_plain_pytorch(target: str, draft: str, model: Qwen3ForCausalLM) -> None:
    """Draft tokens, step by step over 60 tokens, equal those of an independent implementation.

    test_formats.py compares the drafts of all formats, at page size 1.
    """
    config = draft_config()
    weights = draft_weights(config)
    ids = prompt(5, 30)
    with InProcess(target, draft, page_size=16) as engine:
        steps = trace(engine, ids, 60)
    for output, block in steps:
        assert block[0] == output[-1]
        assert block[1:] == draft_block(model, Semantics.of_zlab(config), weights, ids + output)


def test_features_are_hidden_states(target: str, draft: str, model: Qwen3ForCausalLM) -> None:
    """Captured features are Transformers' hidden_states[k + 1], not those of its neighbours."""
    ids = prompt(6, 40)
    with InProcess(target, draft) as engine:
        captured: list[torch.Tensor] = []
        write = engine.worker.context_kv.write

        def watched(states: torch.Tensor, *rest: torch.Tensor) -> None:
            captured.append(states.clone())
            write(states, *rest)

        engine.worker.context_kv.write = watched
        engine.generate(ids, max_new_tokens=1)
    layers = draft_config()["dflash_config"]["target_layer_ids"]
    torch.testing.assert_close(
        captured[0], features(model, ids, [k + 1 for k in layers]), atol=HIDDEN_STATE_BOUND, rtol=0
    )
    for shift in (-1, 1):
        neighbour = features(model, ids, [k + 1 + shift for k in layers])
        assert (captured[0] - neighbour).abs().max() > 1e-2


@pytest.mark.parametrize("changed", [0, 1])
def test_copies_of_the_targets_vocabulary_are_dropped(
    target: str, model: Qwen3ForCausalLM, tmp_path: Path, changed: int
) -> None:
    """DeepSpec's checkpoints hold them. Weights that differ are the draft's own."""
    config = draft_config()
    weights = draft_weights(config)
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach() + changed
    weights["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    weights["lm_head.weight"][7] += changed
    ids = prompt(12, 20)
    with InProcess(target, str(write_draft(tmp_path, config, weights))) as engine:
        own = set(dict(engine.worker.draft_model_runner.model.named_parameters()))
        copies = {"embed_tokens.weight", "lm_head.weight"}
        assert copies & own == (copies if changed else set())
        steps = trace(engine, ids, 12)
    for output, block in steps:
        assert block[1:] == draft_block(model, Semantics.of_zlab(config), weights, ids + output)


def test_last_layer_is_a_target_layer(target: str, model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    """Layer L-1 works, alone and with others; it is Transformers' hidden_states[L]."""
    ids = prompt(7, 20)
    for layers in ([0, 3], [3]):
        config = draft_config(dflash_config={"target_layer_ids": layers})
        weights = draft_weights(config)
        path = write_draft(tmp_path / str(len(layers)), config, weights)
        with InProcess(target, str(path)) as engine:
            steps = trace(engine, ids, 12)
        for output, block in steps:
            assert block[1:] == draft_block(model, Semantics.of_zlab(config), weights, ids + output)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_prefix_hit_keeps_the_trace(target: str, draft: str, page: int) -> None:
    """A prompt again, a longer one, and one that ends inside a page get the same drafts."""
    ids = prompt(8, 37)
    variants = [ids, ids + prompt(9, 10), ids[:30], ids[:18] + prompt(10, 9)]
    with InProcess(target, draft, page_size=page) as engine:
        recorder = record(engine)

        def run(tokens: list[int]) -> tuple[list[int], list[list[int]], int]:
            req = engine.add(tokens, max_new_tokens=20, ignore_eos=True)
            engine.run(req)
            return list(req.output_ids), recorder.blocks[req.rid], req.cached_tokens

        for variant in variants:
            engine.scheduler.flush_cache()
            cold = run(variant)
            engine.scheduler.flush_cache()
            run(ids)
            warm = run(variant)
            assert cold[2] == 0
            assert warm[2] >= 17 // page * page
            assert warm[:2] == cold[:2]


def test_cached_tokens_equal_target(target: str, draft: str) -> None:
    """A prefix hit is as long as without speculation."""

    def cached(engine: InProcess) -> list[int]:
        first = engine.generate(prompt(11, 40), max_new_tokens=24, ignore_eos=True)
        counts = []
        for ids in (prompt(11, 40), prompt(11, 40) + first + prompt(12, 3)):
            req = engine.add(ids, max_new_tokens=8, ignore_eos=True)
            engine.run(req)
            counts.append(req.cached_tokens)
        return counts

    for page in (1, 16):
        with InProcess(target, page_size=page) as engine:
            expected = cached(engine)
        with InProcess(target, draft, page_size=page) as engine:
            assert cached(engine) == expected


def test_shared_prefix_is_never_written(target: str, draft: str) -> None:
    """Requests that share a cached prefix leave its draft KV as it is."""
    shared = prompt(13, 32)
    with InProcess(target, draft) as engine:
        engine.generate(shared, max_new_tokens=1)
        holder = engine.add([*shared, 7], max_new_tokens=40, ignore_eos=True)
        engine.step()
        before = draft_kv(engine, holder.req_pool_idx, len(shared))
        others = [engine.add([*shared, i], max_new_tokens=20, ignore_eos=True) for i in (8, 9, 10)]
        while not all(req.finished() for req in others):
            engine.step()
        assert all(req.cached_tokens >= len(shared) - 1 for req in others)
        assert torch.equal(before, draft_kv(engine, holder.req_pool_idx, len(shared)))
        engine.run(holder)


@pytest.mark.parametrize("page", [1, 4])
def test_chunked_prefill_gives_the_same_draft_kv(target: str, draft: str, page: int) -> None:
    """Chunks of one, page-1, page and page+1 tokens (page-aligned where SGLang demands it)."""
    ids = prompt(14, 21)
    kv = {}
    chunks = {-1, 1, 3, 4, 5, 8} if page == 1 else {-1, 4, 8}
    for chunk in sorted(chunks):
        flags = {"page_size": page, "chunked_prefill_size": chunk, "disable_radix_cache": True}
        with InProcess(target, draft, **flags) as engine:
            req = engine.add(ids, max_new_tokens=8, ignore_eos=True)
            while not req.output_ids:
                engine.step()
            kv[chunk] = draft_kv(engine, req.req_pool_idx, len(ids))
            engine.run(req)
    for chunk in chunks:
        torch.testing.assert_close(kv[chunk], kv[-1], atol=HIDDEN_STATE_BOUND, rtol=0)


def test_drafts_are_argmax_and_repeat(target: str, draft: str) -> None:
    """The same state gives the same block, for greedy and for sampled requests."""
    with InProcess(target, draft) as engine:
        recorder = record(engine)
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}):
            engine.generate(prompt(15, 12), max_new_tokens=2, ignore_eos=True, **options)
        greedy, sampled = (blocks[0] for blocks in recorder.blocks.values())
        assert greedy == sampled
        assert len(greedy) == BLOCK


def test_padded_rows_are_never_drafted(tmp_path: Path) -> None:
    """Rows that pad the vocabulary are never drafted, even with huge values."""
    target = write_target(tmp_path / "target", vocab_size=150)
    config = draft_config(vocab_size=150, dflash_config={"mask_token_id": 149})
    draft = write_draft(tmp_path / "draft", config, draft_weights(config))
    with InProcess(str(target), str(draft)) as engine:
        head = engine.worker.draft_model_runner.model.vocabulary.lm_head
        assert head.weight.shape == (192, HIDDEN)
        head.weight.data[150:] = 1e4
        recorder = record(engine)
        output = engine.generate(prompt(16, 10), max_new_tokens=20, ignore_eos=True)
        drafted = [token for blocks in recorder.blocks.values() for row in blocks for token in row]
    assert max(drafted + output) < 150


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head(tmp_path: Path, tied: bool) -> None:
    """The draft uses the target's LM head, tied to its embedding or not."""
    target = write_target(tmp_path / "target", tie_word_embeddings=tied)
    config = draft_config()
    weights = draft_weights(config)
    draft = write_draft(tmp_path / "draft", config, weights)
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = prompt(17, 15)
    with InProcess(str(target), str(draft)) as engine:
        recorder = record(engine)
        output = engine.generate(ids, max_new_tokens=2, ignore_eos=True)
        [[block, *_]] = recorder.blocks.values()
    assert block[1:] == draft_block(model, Semantics.of_zlab(config), weights, ids + output[:1])


def test_generated_mask_token_survives(target: str, draft: str, alone: Alone) -> None:
    """A token equal to mask_token_id is output like any other."""
    mask = draft_config()["dflash_config"]["mask_token_id"]
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "logit_bias": {str(mask): 100.0},
        "ignore_eos": True,
    }
    [expected] = alone([(prompt(18, 9), options)])
    assert expected["ids"] == [mask] * 12
    with InProcess(target, draft) as engine:
        forced = force(engine, lambda _: 7)
        req = engine.add(prompt(18, 9), **options)
        forced.truth[req.rid] = expected["ids"]
        engine.run(req)
        assert list(req.output_ids) == expected["ids"]


@pytest.mark.parametrize("page", [1, 4])
def test_draft_window(target: str, draft: str, model: Qwen3ForCausalLM, page: int) -> None:
    """--speculative-draft-window-size: the draft sees only the last tokens. The output is exact."""
    config = draft_config()
    weights = draft_weights(config)
    ids, window = prompt(19, 50), 16
    with InProcess(target, draft, page_size=page, speculative_draft_window_size=window) as engine:
        steps = trace(engine, ids, 30)
    with InProcess(target, disable_radix_cache=True) as engine:
        expected = engine.generate(ids, max_new_tokens=30, ignore_eos=True)
    for output, block in steps:
        assert output == expected[: len(output)]
        whole = ids + output
        first = max(0, len(whole) - 1 - window) // page * page
        assert block[1:] == draft_block(
            model, Semantics.of_zlab(config), weights, whole, first=first
        )
    assert any(
        block[1:] != draft_block(model, Semantics.of_zlab(config), weights, ids + output)
        for output, block in steps
    )


def test_first_tokens_leave_before_the_context_kv(
    target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the copy of the first tokens. A GPU makes copies in queue order."""
    order = []

    def copied(tensor: torch.Tensor) -> HostCopy:
        order.append("first tokens")
        return HostCopy(tensor)

    monkeypatch.setattr(prefill, "HostCopy", copied)
    with InProcess(target, draft) as engine:
        write = engine.worker.context_kv.write

        def written(*given: torch.Tensor) -> None:
            order.append("context KV")
            write(*given)

        engine.worker.context_kv.write = written
        engine.generate(prompt(8, 20), max_new_tokens=1)
    assert order == ["first tokens", "context KV"]
