#!/bin/bash
# What only a GPU can show, in stages; each ends within 9 minutes and writes 8 files at most.
#
#   benchmark/gpu.sh STAGE...
#
#   kernels     our kernels against their references, a batch on every backend, with and without graphs
#   tests       all of test/gpu but the quantised drafts
#   exact       tokens of the bundled pair in bf16 against those of no speculation, on every backend
#   speed       8B shapes, SIMULATED acceptance, fa3: no speculation, the built-in, ours
#   trace       the same: a profile of ten steps, ours and the built-in's
#   peer        the same: the DFLASH of another SGLang, which PEER has, and ours
#   not_ahead   the same: ours, not drafting ahead
#   flashinfer  the same with flashinfer: the built-in, ours
#   pages       the same: ours, page size 1 and 16
#   widths      the bundled pair: whole blocks verified, and as much as pays
#   rows        8B shapes, SIMULATED survival by position, fa3: whole blocks, and the rows that pay;
#               times of steps by requests and rows
#   sampled     the bundled pair at temperature 0.8 and 1, with and without a filter: all three sides
#   quantised   fp8, AWQ and GPTQ drafts
#   families    DSpark, DFlash 2 and Domino drafts of the bundled target: exact tokens, speed
#   newer_families  the same with JetSpec, DSpine and LiLiCorr drafts
#   hybrid      the hybrid target of training/: exact tokens on every backend, speed
#
# PYTHON  a Python with torch 2.11 (CUDA 13)                          [python3]
# BUNDLE  folder of unpack.sh and bundle/, to install SGLang from; unset: it is installed already
# PEER    a folder with another SGLang for $PYTHON, such as `pip install --target` makes
# OUT     where results go: JSON, and logs.tar.gz                     [benchmark/results/gpu]
#         A stage continues where it stopped, at the same commit: the parts in $OUT/done, and the
#         tests in $OUT/passed, are not run again.
# ONLY    of the tests, those that this expression selects, as pytest -k has it
# DRY_RUN=1 runs the same commands on a CPU with the bundled pair, to see that they work.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-benchmark/results/gpu}
export SGLANG_LOG_MS=1 PYTHONUNBUFFERED=1

# part SECONDS NAME COMMAND...: its output goes to a log that comes back, its end to the screen.
# FINE  a status besides 0 that ends it well
part() {
  local began=$SECONDS log="$TMPDIR/$2.log" status
  local what="$2${SIDES:+ SIDES=$SIDES}${ONLY:+ ONLY=$ONLY}${DRY_RUN:+ DRY_RUN}"
  if grep -qxF "$what" "$OUT/done"; then
    echo "== $what: done before, says $OUT/done"
    return 0
  fi
  timeout --signal=INT --kill-after=15 "$1" "${@:3}" >"$log" 2>&1
  status=$?
  tail -n "${TAIL:-25}" "$log"
  if [ $status = 0 ] || [ $status = "${FINE:-0}" ]; then
    echo "$what" >>"$OUT/done"
    echo "== $what: done after $((SECONDS - began)) s"
    return 0
  fi
  echo "== $what: status $status after $((SECONDS - began)) s; read logs/$2.log of $OUT/logs.tar.gz"
  return $status
}

# Node IDs of a log of pytest that have this result, as options that leave them out.
with_result() { # RESULT LOG
  sed -n "s/.* $1 \\(test[^ ]*\\).*/--deselect=\\1/p" "$2"
}
tests() { # NAME SECONDS ARGUMENTS...
  local status log="$TMPDIR/$1.log"
  touch "$OUT/passed"
  # 5: no tests are left.
  FINE=$([ -s "$OUT/passed" ] && [ -z "${ONLY:-}" ] && echo 5) \
    part "$2" "$1" "$PYTHON" -m pytest -v -p no:cacheprovider -n $workers --dist worksteal \
    --durations 6 --timeout 150 --maxfail 25 test/gpu "@$OUT/passed" "${@:3}"
  status=$?
  if [ -e "$log" ]; then # a test that ends with an error has passed before
    with_result PASSED "$log" | grep -vxFf <(with_result ERROR "$log") >>"$OUT/passed"
    sort -u -o "$OUT/passed" "$OUT/passed"
  fi
  return $status
}
exact() { # NAME ARGUMENTS...
  TAIL=3 part 400 "exact_$1" "$PYTHON" -m benchmark.exactness --out "$OUT/exact_$1.json" \
    "${few[@]}" "${@:2}"
}

stage_kernels() {
  tests kernels 300 -k "kernel or (all_kinds and 1-)"
}
stage_tests() {
  tests tests 500 --deselect test/gpu/test_quantised.py ${ONLY:+-k "$ONLY"}
}
stage_exact() {
  local started=() each failed=0
  exact fa3 $(backend fa3) & started+=($!)
  exact flashinfer $(backend flashinfer) & started+=($!)
  exact triton $(backend triton) --page-size 16 & started+=($!)
  for each in "${started[@]}"; do wait "$each" || failed=1; done
  return $failed
}
stage_speed() {
  part 500 speed "$PYTHON" -m benchmark.sweep "${dummy[@]}" "${simulated[@]}" "${load[@]}" \
    $(backend fa3) --sides "${SIDES:-none,builtin,ours}" --out "$OUT/speed_fa3${SIDES:+_${SIDES//,/_}}.json"
}
stage_trace() {
  TAIL=80 part 400 trace "$PYTHON" -m benchmark.trace "${dummy[@]}" $(backend fa3) \
    --sides "${SIDES:-ours,builtin}" ${DRY_RUN:+--tokens 600} --out "$OUT"
}
stage_peer() {
  local python=$PYTHON
  if [ -n "${PEER:-}" ]; then
    python=$work/peer-python
    printf '#!/bin/sh\nPYTHONPATH=%s TVM_FFI_CACHE_DIR=%s PATH=%s exec %s "$@"\n' "$PEER" \
      "$PEER/.tvm-ffi-cache" "$PEER/.jit-bin:\$PATH" "$PYTHON" >"$python"
    chmod +x "$python"
  elif [ -z "${DRY_RUN:-}" ]; then # which compares the SGLang at hand
    echo "The stage peer needs PEER: see the head of $0." >&2
    return 1
  fi
  part 500 peer "$PYTHON" -m benchmark.sweep "${dummy[@]}" "${simulated[@]}" "${load[@]}" \
    $(backend fa3) --sides "${SIDES:-ours,peer}" --peer "$python" --out "$OUT/speed_peer.json"
}
stage_not_ahead() {
  SGLANG_DFLASH_DRAFT_AHEAD=off part 200 not_ahead "$PYTHON" -m benchmark.sweep "${dummy[@]}" \
    "${simulated[@]}" "${load[@]}" $(backend fa3) --sides ours --out "$OUT/speed_fa3_not_ahead.json"
}
stage_flashinfer() {
  part 400 flashinfer "$PYTHON" -m benchmark.sweep "${dummy[@]}" "${simulated[@]}" "${load[@]}" \
    $(backend flashinfer) --sides builtin,ours --out "$OUT/speed_flashinfer.json"
}
stage_pages() {
  part 400 pages "$PYTHON" -m benchmark.sweep "${dummy[@]}" "${simulated[@]}" "${load[@]}" \
    $(backend fa3) --sides ours --page-size 1,16 --out "$OUT/speed_pages.json"
}
stage_widths() {
  part 200 widths "$PYTHON" -m benchmark.sweep --sides ours --mix --verify-width full,auto \
    --max-total-tokens 32768 "${load[@]}" $(backend fa3) --out "$OUT/widths.json"
}
stage_rows() {
  local profile status=0
  for profile in math_500 mt_bench; do
    part 260 "rows_$profile" "$PYTHON" -m benchmark.sweep "${dummy[@]}" "${many[@]}" \
      --simulate-survival $profile --ignore-eos --mix --sides ours --verify-width full,auto \
      $(backend fa3) --out "$OUT/rows_$profile.json" || status=1
  done
  grep -rhE "captured verifies|step times|requests: draft" "$TMPDIR" | sort -u >"$OUT/rows_times.txt"
  return $status
}
stage_sampled() {
  part 400 sampled "$PYTHON" -m benchmark.sweep --sides none,builtin,ours --mix \
    --temperature 0.8,1 --filter '{"top_p": 0.95, "top_k": 20}' --max-total-tokens 32768 \
    "${load[@]}" $(backend fa3) --out "$OUT/sampled.json"
}
stage_families() { of_families families dspark dflash2 domino; }
stage_newer_families() { of_families newer_families jetspec dspine lilicorr; }
of_families() { # NAME FAMILY...: drafts of these families for the bundled target
  local drafts="$work/families" started=() each failed=0 sides
  "$PYTHON" -m training.families --out "$drafts" || return 1
  for each in "${@:2}"; do
    exact "$each" --draft "$drafts/$each" $(backend fa3) & started+=($!)
  done
  for each in "${started[@]}"; do wait "$each" || failed=1; done
  sides=$(printf ',%s' "${@:2}")
  part 400 "$1" "$PYTHON" -m benchmark.sweep --sides "ours$sides" --families "$drafts" \
    --mix --max-total-tokens 32768 "${load[@]}" $(backend fa3) --out "$OUT/$1.json" || failed=1
  return $failed
}
stage_hybrid() { # recurrent states: in graphs, behind prefix hits, and for narrower verifies
  local pair="$work/hybrid" started=() each failed=0
  "$PYTHON" -m training.hybrid --out "$pair" || return 1
  pair=(--model "$pair/target" --draft "$pair/draft")
  # Else each server takes half of the free memory for recurrent states.
  local states="--server-flags=--max-mamba-cache-size 128"
  exact hybrid_fa3 "${pair[@]}" $(backend fa3) "$states" & started+=($!)
  exact hybrid_flashinfer "${pair[@]}" $(backend flashinfer) --verify-width 5 "$states" & started+=($!)
  exact hybrid_triton "${pair[@]}" $(backend triton) --server-flags=--disable-radix-cache & started+=($!)
  for each in "${started[@]}"; do wait "$each" || failed=1; done
  if [ -z "${DRY_RUN:-}" ]; then # refused on a CPU
    exact hybrid_intervals "${pair[@]}" $(backend fa3) --page-size 64 \
      "$states --mamba-scheduler-strategy extra_buffer --mamba-track-interval 64" || failed=1
  fi
  part 400 hybrid "$PYTHON" -m benchmark.sweep --sides none,ours "${pair[@]}" "$states" --mix \
    --max-total-tokens 32768 "${load[@]}" $(backend fa3) --out "$OUT/hybrid.json" || failed=1
  return $failed
}
stage_quantised() {
  part 450 quantised "$PYTHON" -m pytest -q -p no:cacheprovider -n 3 test/gpu/test_quantised.py
}

stages=("${@:-kernels}")
for stage in "${stages[@]}"; do
  declare -F "stage_$stage" >/dev/null && continue
  echo "No stage $stage: see the head of $0." >&2
  exit 2
done

mkdir -p "$OUT"
commit=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
if [ -e "$OUT/done" ]; then
  before=$(head -n 1 "$OUT/done")
  if [ "$before" != "$commit" ] || [[ $commit == unknown || $commit == *-dirty ]]; then
    echo "$OUT holds results of commit $before, this is $commit: give another OUT." >&2
    exit 1
  fi
fi
if [ -n "${BUNDLE:-}" ]; then
  unpacked=$(bash "$BUNDLE/unpack.sh" "$BUNDLE/bundle") || exit 1
  eval "$(grep ^export <<<"$unpacked")"
fi
if [ -z "${DRY_RUN:-}" ] && ! "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
  echo "No CUDA GPU that $PYTHON can use: nothing is measured." >&2
  exit 1
fi

work=$(mktemp -d)
export TMPDIR=$work/logs DFLASH_KEEP_LOGS=1
mkdir -p "$TMPDIR"
finish() {
  tar -czf "$OUT/logs.tar.gz" -C "$work" --exclude '*.json.gz' --exclude 'pytest-of-*' \
    --exclude 'torchinductor_*' logs 2>/dev/null
  rm -rf "$work"
}
[ -e "$OUT/logs.tar.gz" ] && tar -xzf "$OUT/logs.tar.gz" -C "$work" # of stages before
trap finish EXIT
export PYTHONPATH="$work/site:$PWD:$PWD/benchmark/builtin_cpu${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -m benchmark.entry_points "$work/site" || exit 1
[ -e "$OUT/done" ] || echo "$commit" >"$OUT/done"

if [ -n "${DRY_RUN:-}" ]; then
  export DFLASH_DRY_RUN=1
  workers=2 dummy=(--max-total-tokens 16384 --max-running-requests 4 --threads 1)
  few=(--prompts 3 --max-tokens 16 --max-total-tokens 8192 --threads 1)
  load=(--prompts 4 --per-slot 1 --concurrency 1,2 --max-tokens 32 --repeats 1)
  many=("${load[@]}")
  backend() { :; } # the one that a CPU has
else
  workers=${WORKERS:-8}
  "$PYTHON" -m benchmark.dummy "$work/dummy" || exit 1
  # Short lists of graphs, the same for every side, make starts short.
  flags="--load-format dummy --speculative-draft-load-format dummy --mem-fraction-static 0.9"
  flags="$flags --cuda-graph-bs 1 8 32 --piecewise-cuda-graph-tokens"
  flags="$flags 16 32 48 64 96 128 192 256 384 512 640 768 896 1024 1152 1280 1536 2048"
  dummy=(--model "$work/dummy/target" --draft "$work/dummy/draft" --server-flags="$flags")
  few=(--prompts 192 --max-total-tokens 16384)
  load=(--prompts 64 --per-slot 4 --concurrency 1,8,32 --max-tokens 256 --repeats 3)
  many=(--server-flags="${flags/--cuda-graph-bs 1 8 32/--cuda-graph-bs 1 4 8 16 32 64}")
  many+=(--max-running-requests 64 --prompts 86 --per-slot 4 --concurrency 1,4,8,16,32,64)
  many+=(--max-tokens 256 --repeats 3)
  backend() { echo --attention-backend "$1"; }
fi
few+=(--max-running-requests 8)
simulated=(--simulate-accept-length 6.36 --ignore-eos --mix --apart)

status=0
for stage in "${stages[@]}"; do
  "stage_$stage" || status=1
done
exit $status
