"""`python -m training.refresh`: serve, collect, train, refresh; a draft follows its target.

A server starts with the bundled pair. Its target gets the weights of one that learned to answer in
another style, so drafts are accepted less. The server's own traffic writes the features of its
answers, the bundled draft is trained on them, and the server gets the new draft. It runs all the
time, and the accept lengths are those of its held-out requests.

With --url, this happens to a server that runs already with `--speculative-dflash-features FOLDER`:
--features is that folder, whose files its clients have asked for, and --target its target.
With --features alone, the draft is trained and no server is asked.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tiny.prompts import Example, held_out
from sglang_dflash.tools.launch import Server
from training import data
from training.draft import SHORTEST_ANSWER, Answer, fit, write_draft
from training.draft_model import Draft
from training.export import serve_older_transformers
from training.rows import conversation, packed
from training.run import Run
from training.shapes import DRAFT_CONFIG
from training.target import load_frozen, loss_of_rows

TARGET_RATE, DRAFT_RATE = 1e-3, 1e-3
BATCH, ANCHORS = 8, 12  # answers of a step, blocks of each
AT_ONCE = 8  # requests
NEW_TOKENS = 128
MEASURED = 16  # held-out prompts


def in_other_style(rng: random.Random) -> Example:
    """A word problem whose answer is a list."""
    example = data.word_problem(rng)
    steps = example.answer.removesuffix(".").split(". ")
    return replace(example, answer="\n".join(f"- {step}" for step in steps))


def change_target(work: Path, steps: int, device: str) -> Path:
    """Teach the bundled target the other style, and write it to work/target."""
    folder = work / "target"
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).to(device)
    run = Run(model, TARGET_RATE, steps, work / "target.pt", muon=False)
    rng = random.Random(71 + run.done)
    documents = (conversation(tokenizer, rng, in_other_style) for _ in iter(int, 1))
    batches = packed(documents)
    for bar in run.steps_left("target"):
        loss = loss_of_rows(model, *(t.to(device) for t in next(batches)))
        run.step(loss)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    serve_older_transformers(folder)
    return folder


def train(work: Path, target: Path, features: Path, steps: int, device: str) -> Path:
    """Train the bundled draft for a target on collected features, and write it to work/draft."""
    torch.manual_seed(1)
    draft = Draft(DRAFT_CONFIG)
    draft.load_state_dict({k: w.float() for k, w in load_file(DRAFT / "model.safetensors").items()})
    answers = read_features(features)
    run = Run(draft.to(device), DRAFT_RATE, steps, work / "draft.pt", muon=False)
    rng = random.Random(72 + run.done)
    model = load_frozen(target, device)
    fit(draft, run, model, lambda r: r.choices(answers, k=BATCH), rng, device, False, ANCHORS)
    run.path.unlink()  # the next run follows the next target
    return write_draft(draft, work / "draft")


def read_features(folder: Path) -> list[Answer]:
    """The answers whose features a server has written, in either form."""
    found = []
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            stored = load_file(file)
            ids, states = stored["token_ids"], stored["hidden_states"][:, :-1].flatten(1)
        elif file.suffix == ".ckpt":
            stored = torch.load(file, weights_only=True)
            ids, states = stored["input_ids"], stored["hidden_states"]
        else:
            continue
        learned = int(stored["loss_mask"].sum())
        if learned >= SHORTEST_ANSWER:
            first = len(ids) - learned
            found.append(Answer(ids, states.to(torch.bfloat16), first))
    if not found:
        raise SystemExit(f"The folder {folder} holds no features of answers.")
    return found


class Running:
    """A server that is refreshed while it runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The `meta_info` of an answer to a chat of one turn."""
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS} | options
        answer = self._post("/generate", {"text": text, "sampling_params": sampling})
        found: dict[str, Any] = answer["meta_info"]
        return found

    def ask_all(self, prompts: list[str], **options: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **options), prompts))

    def collect(self, count: int, folder: Path) -> None:
        """Have the server answer `count` prompts, none held out, and write their features."""
        rng = random.Random(73)
        drawn = (data.word_problem(rng).prompt for _ in iter(int, 1))
        prompts = islice((each for each in drawn if not data.is_held_out(each)), count)
        asked = self.ask_all(list(prompts), custom_params={"features": True})
        rids = [info["id"] for info in asked if info["completion_tokens"] > SHORTEST_ANSWER]
        waited = time.monotonic() + 60
        while any(not list(folder.glob(f"{rid}.*")) for rid in rids):
            if time.monotonic() > waited:
                raise SystemExit(f"The server has not written all features to {folder}.")
            time.sleep(0.1)

    def accept_length(self) -> float:
        """Tokens of a step, over held-out prompts."""
        asked = self.ask_all([each.prompt for each in held_out("word", MEASURED)])
        tokens = sum(info["completion_tokens"] for info in asked)
        return float(tokens / sum(info["spec_verify_ct"] for info in asked))

    def refresh(self, folder: Path, selector: str) -> None:
        """Give it new weights of its `target` or of its `draft`."""
        body = {"model_path": str(folder.absolute()), "selector": selector}
        self._post("/update_weights_from_disk", body)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = requests.post(f"{self.url}{path}", json=body, timeout=600)
        if response.status_code != 200:
            raise SystemExit(f"{path}: HTTP {response.status_code}: {response.text}")
        return response.json()


@contextmanager
def serving(features: Path, form: str) -> Iterator[Running]:
    """A server with the bundled pair that writes features."""
    flags = {
        "--model-path": TARGET,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": DRAFT,
        "--speculative-dflash-features": features.absolute(),
        "--speculative-dflash-features-form": form,
        "--max-total-tokens": 16384,
        "--max-running-requests": AT_ONCE,
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    with Server([*arguments, "--sleep-on-idle"]) as server:
        yield Running(server.url)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.refresh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, required=True, help="where to resume from")
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--features", type=Path, help="folder with the features of its answers")
    parser.add_argument("--target", type=Path, help="folder of its target")
    parser.add_argument("--form", choices=("speculators", "specforge"), default="speculators")
    parser.add_argument("--target-steps", type=int, default=60)
    parser.add_argument("--answers", type=int, default=600)
    parser.add_argument("--draft-steps", type=int, default=150)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if (args.features is None) != (args.target is None) or (args.url and args.features is None):
        parser.error("--url needs --features, and --features and --target need each other")
    return args


def main() -> None:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    lengths: dict[str, float] = {}
    if args.features is None:
        features = args.work / "features"
        features.mkdir(exist_ok=True)
        target = change_target(args.work, args.target_steps, args.device)
        with serving(features, args.form) as running:
            lengths["bundled pair"] = running.accept_length()
            running.refresh(target, "target")
            lengths["changed target"] = running.accept_length()
            running.collect(args.answers, features)
            draft = train(args.work, target, features, args.draft_steps, args.device)
            running.refresh(draft, "draft")
            lengths["refreshed draft"] = running.accept_length()
    else:
        given = Running(args.url) if args.url else None
        if given is not None:
            lengths["before"] = given.accept_length()
        draft = train(args.work, args.target, args.features, args.draft_steps, args.device)
        print(draft)
        if given is not None:
            given.refresh(draft, "draft")
            lengths["after"] = given.accept_length()
    print(json.dumps({name: round(length, 2) for name, length in lengths.items()}))


if __name__ == "__main__":
    main()
