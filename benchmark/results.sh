#!/bin/bash
# The full sweep of the bundled pair on this machine, its plots beside it. Every file goes on where
# it stopped; a file that is complete costs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmark/results}
threads=${THREADS:-1} # of a server; the other cores are the client's and the tokenizer's
sweep() { "$python" -m benchmark.sweep --mix --threads "$threads" --out "$out/$1.json" "${@:2}"; }

sweep concurrency --prompts 11
sweep widths --sides ours --verify-width full,8,auto --prompts 11 --per-slot 3 \
  --concurrency 1,8,32 --repeats 2
"$python" -m benchmark.step_cost --threads "$threads" --sides ours,builtin,none --out "$out/step_cost.json"
"$python" -m benchmark.sweep --threads "$threads" --out "$out/workloads.json" --prompts 6 \
  --concurrency 1 --repeats 2
families=$(mktemp -d)
sides=ours,dspark,dflash2,domino,jetspec,dspine,lilicorr
trap 'rm -rf "$families"' EXIT
"$python" -m training.families --out "$families"
"$python" -m benchmark.sweep --threads "$threads" --out "$out/families.json" --prompts 11 \
  --concurrency 1 --families "$families" --sides "none,$sides"
"$python" -m benchmark.step_cost --threads "$threads" --out "$out/step_cost-families.json" \
  --families "$families" --sides "$sides" --batches 1,8 --contexts 64,512 --repeats 8
small=(--prompts 6 --per-slot 4 --repeats 2)
sweep blocks --block-size 8 --concurrency 1,8 "${small[@]}"
sweep temperature --sides none,ours --temperature 0.7 --concurrency 1,8 "${small[@]}"
sweep pages --page-size 16 --concurrency 1,8 "${small[@]}"
sweep tp2 --tp 2 --concurrency 8 "${small[@]}"
"$python" -m benchmark.plot "$out/concurrency.json" "$out/step_cost.json"
