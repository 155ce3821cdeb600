#!/usr/bin/env bash
# The figures of E11 on GPUs of one host, in one run: benchmarks/ddp_vs_fsdp_campaign.sh OUT
# fp32 at both global batches first, then bf16. Needs an installed stepgauge, or PYTHONPATH=src. SECONDS_LEFT bounds the
# whole; RANKS, DEVICE, SIZE, BATCHES, CONTEXT and STEPS make it small enough to try on a CPU.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
limit=${SECONDS_LEFT:-280}
load=(--device "${DEVICE:-cuda}" --ranks "${RANKS:-2}" --size "${SIZE:-bert-base}" --context "${CONTEXT:-512}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# part NAME SECONDS ARGUMENTS...: rows into OUT/records.jsonl, the aggregate into OUT/NAME.json.
part() {
  local name=$1 most=$2 left=$((limit - SECONDS))
  shift 2
  ((left > 10)) || { echo "$name: no time left"; return; }
  timeout "$((most < left ? most : left))" python3 -m stepgauge bench data-parallel "${load[@]}" \
    --warmup 5 --steps "${STEPS:-20}" "$@" --out "$work/$name" >>"$out/tables.txt" 2>>"$out/log.txt"
  echo "$name: status $?, $SECONDS s so far" | tee -a "$out/log.txt"
  cat "$work/$name/records.jsonl" >>"$out/records.jsonl" 2>/dev/null
  cat "$work/$name/failures.log" >>"$out/failures.txt" 2>/dev/null
  python3 -m stepgauge show "$work/$name" --over seed --format json >"$out/$name.json"
}

# of each rank: 64 and 16 of two
read -ra batches <<<"${BATCHES:-32 8}"
rows=(--wrapper torch-ddp torch-fsdp bucketed zero3 --seed 1 2 3 --batch "${batches[@]}")
part fp32 150 --precision fp32 "${rows[@]}"
part bf16 120 --precision bf16 "${rows[@]}"
exit 0
