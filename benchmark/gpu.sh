#!/bin/bash
# Ours, the built-in and no speculation on a CUDA GPU: dummy Qwen3-8B shapes at SIMULATED accept
# length 6.36, then the bundled pair's exactness and the time of a step. Uses $PYTHON, needs nothing
# outside the repo, ends inside 9 minutes, writes its JSON to $OUT as it goes.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmark/results/gpu}

if ! "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "No CUDA GPU that $PYTHON can use: nothing is measured."
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
export PYTHONPATH="$work/site:$PWD:$PWD/benchmark/builtin_cpu${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -m benchmark.entry_points "$work/site" || exit 1
"$PYTHON" -m benchmark.dummy "$work/dummy" || exit 1

# part SECONDS NAME COMMAND...: at most SECONDS, and no more than is left of 9 minutes.
part() {
  local left=$((510 - SECONDS))
  local most=$(($1 < left ? $1 : left))
  if ((most < 45)); then
    echo "LEFT OUT: $2, no time." >&2
    return
  fi
  echo "== $2 (at most $most s)" >&2
  timeout --kill-after=12 "$most" "${@:3}" || echo "$2: ended with status $?" >&2
}

random="--load-format dummy --speculative-draft-load-format dummy"
dummy=(--model "$work/dummy/target" --draft "$work/dummy/draft" --server-flags="$random")
for backend in flashinfer fa3; do
  part 180 "sweep with $backend, SIMULATED acceptance" "$PYTHON" -m benchmark.sweep "${dummy[@]}" \
    --attention-backend $backend --simulate-accept-length 6.36 --ignore-eos --mix \
    --prompts 32 --per-slot 6 --concurrency 1,8,32 --repeats 2 --out "$OUT/dummy_8b_$backend.json"
done
part 110 "exactness of the bundled pair" "$PYTHON" -m sglang_dflash.cli demo --json |
  tee "$OUT/exactness.json"
SGLANG_DFLASH_DRAFT_AHEAD=on part 150 "fa3, drafting ahead, two widths, SIMULATED acceptance" \
  "$PYTHON" -m benchmark.sweep "${dummy[@]}" --sides ours --attention-backend fa3 \
  --verify-width full,auto --simulate-accept-length 6.36 --ignore-eos --mix \
  --prompts 32 --per-slot 6 --concurrency 1,8,32 --repeats 2 --out "$OUT/dummy_8b_fa3_ahead.json"
part 120 "time of a step, SIMULATED acceptance" "$PYTHON" -m benchmark.step_cost "${dummy[@]}" \
  --sides ours,builtin,none --contexts 64,2048 --max-total-tokens 98304 --json \
  --out "$OUT/step_cost.json"
"$PYTHON" -m benchmark.plot "$OUT"/dummy_8b_*.json "$OUT"/step_cost.json 2>/dev/null ||
  echo "No plots: $PYTHON has no matplotlib, or nothing was measured."
