#!/usr/bin/env bash
# Compares DDP with FSDP (E11) on the GPUs of one host, fp32 first, then bf16:
#   benchmarks/ddp_vs_fsdp_campaign.sh OUT
# SECONDS_LEFT=... is the limit in seconds (280 by default). RANKS, DEVICE, SIZE, BATCHES, CONTEXT and STEPS make it
# small enough for a CPU. Needs an installed stepgauge, or PYTHONPATH=src.
# Writes OUT/records.jsonl, OUT/{fp32,bf16}.json with the aggregates over seeds, OUT/tables.txt and OUT/log.txt.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
limit=${SECONDS_LEFT:-280}
load=(--device "${DEVICE:-cuda}" --ranks "${RANKS:-2}" --size "${SIZE:-bert-base}" --context "${CONTEXT:-512}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# part NAME SECONDS ARGUMENTS...: appends rows to OUT/records.jsonl and writes their aggregate to OUT/NAME.json.
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

# Per rank; the global batches of two ranks are 64 and 16.
read -ra batches <<<"${BATCHES:-32 8}"
rows=(--wrapper torch-ddp torch-fsdp bucketed zero3 --seed 1 2 3 --batch "${batches[@]}")
part fp32 150 --precision fp32 "${rows[@]}"
part bf16 120 --precision bf16 "${rows[@]}"
exit 0
