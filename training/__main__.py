"""`python -m training`: make the bundled target and draft from scratch.

Stages: tokenizer, target, answers (what the target itself generates, greedy), draft (on those
answers), evaluate, export. Each stage continues in `--work` where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from training.answers import write_answers
from training.draft import train_draft
from training.evaluate import evaluate
from training.export import export
from training.target import train_target
from training.tokenizer import train_tokenizer

STAGES = ("tokenizer", "target", "answers", "draft", "evaluate", "export")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="where to resume from")
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    parser.add_argument("--target-steps", type=int, default=1250)
    parser.add_argument("--answers", type=int, default=12_000)
    parser.add_argument("--draft-steps", type=int, default=1400)
    parser.add_argument("--evaluate", type=int, default=96, help="held-out prompts of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    compiled = shutil.which("g++") is not None
    wanted = STAGES if args.stage == "all" else (args.stage,)
    if "tokenizer" in wanted and not (args.work / "target" / "tokenizer.json").exists():
        train_tokenizer(args.work / "target")
    if "target" in wanted:
        train_target(args.work, args.target_steps, args.device, compiled)
    if "answers" in wanted:
        write_answers(args.work, args.answers, args.device)
    if "draft" in wanted:
        train_draft(args.work, args.draft_steps, args.device, compiled)
    if "evaluate" in wanted:
        print(json.dumps(evaluate(args.work, args.device, args.evaluate)))
    if "export" in wanted:
        export(args.work)


if __name__ == "__main__":
    main()
