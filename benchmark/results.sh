#!/bin/bash
# The full sweep of the bundled pair on this machine, its plots beside it. Every file goes on where
# it stopped; a file that is complete costs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmark/results}
threads=${THREADS:-1} # of a server; the other cores are the client's and the tokenizer's
sweep() { "$python" -m benchmark.sweep --mix --threads "$threads" --out "$out/$1.json" "${@:2}"; }

sweep concurrency --prompts 24 --per-slot 24
sweep blocks --block-size 4,8 --prompts 16 --concurrency 1,8 --repeats 2
sweep widths --sides none,ours --verify-width 8,auto --prompts 16 --concurrency 1,8,32 --repeats 2
sweep temperature --sides none,ours --temperature 0.7 --prompts 16 --concurrency 1,8
sweep pages --page-size 16 --prompts 16 --concurrency 1,8
sweep tp2 --tp 2 --prompts 16 --concurrency 8 --repeats 2
"$python" -m benchmark.step_cost --threads "$threads" --sides ours,builtin,none --out "$out/step_cost.json"
"$python" -m benchmark.plot "$out/concurrency.json" "$out/step_cost.json"
