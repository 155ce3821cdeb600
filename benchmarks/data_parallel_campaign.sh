#!/usr/bin/env bash
# Measures data parallel wrappers (E9) and sharded state (E10) on the GPUs of one host:
#   benchmarks/data_parallel_campaign.sh OUT
# Starts with the parity tests over NCCL, then measures every wrapper next to torch's at one size, then the rest, most
# important first. PARTS="tests bf16 small narrow" selects parts: these four show in 6 minutes whether a change made a
# wrapper slower. SECONDS_LEFT=... is the limit of all parts in seconds (470 by default). RANKS, DEVICE, SIZE, SIZES,
# BATCH, CONTEXT and STEPS make it small enough for a CPU. Needs an installed stepgauge, or PYTHONPATH=src.
# Writes OUT/{records.jsonl,tables.txt,tests.txt,log.txt,failures.txt}.
set -uo pipefail
known="tests bf16 small narrow traces buckets fp32 sizes gloo"
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
limit=${SECONDS_LEFT:-470}
device=${DEVICE:-cuda} ranks=${RANKS:-2} size=${SIZE:-2.7b} steps=${STEPS:-10}
load=(--batch "${BATCH:-16}" --context "${CONTEXT:-128}" --device "$device" --ranks "$ranks" --warmup 4)
work=$(mktemp -d)
exec 3>&1 # the screen, for parts whose output goes to a file
trap 'rm -rf "$work"' EXIT

# run NAME SECONDS COMMAND...: runs a selected part until SECONDS or the limit of all parts.
run() {
  local name=$1 most=$2 left=$((limit - SECONDS))
  shift 2
  chosen "$name" || return
  ((left > 10)) || { echo "$name: no time left" | tee -a "$out/log.txt" >&3; return; }
  timeout "$((most < left ? most : left))" "$@"
  echo "$name: status $?, $SECONDS s so far" | tee -a "$out/log.txt" >&3
}

# part NAME SECONDS STEPS ARGUMENTS...: runs bench data-parallel and appends its rows to OUT/records.jsonl.
part() {
  local name=$1 most=$2 steps=$3
  shift 3
  run "$name" "$most" python3 -m stepgauge bench data-parallel "${load[@]}" --steps "$steps" "$@" \
    --out "$work/$name" --format table >>"$out/tables.txt" 2>>"$out/log.txt"
  cat "$work/$name/records.jsonl" >>"$out/records.jsonl" 2>/dev/null
  cat "$work/$name/failures.log" >>"$out/failures.txt" 2>/dev/null
}

run tests 90 python3 -m pytest -m gpu tests/parallel/test_nccl.py -p no:cacheprovider >>"$out/tests.txt" 2>&1
overlapping=(bucketed torch-ddp overlapped torch-ddp-views zero1 torch-zero1 zero2 zero3 torch-fsdp)
part bf16 190 "$steps" --size "$size" --precision bf16 --wrapper none naive flat "${overlapping[@]}"
part small 120 "$steps" --size small --precision bf16 --wrapper none naive flat "${overlapping[@]}"
part narrow 90 "$steps" --size "$size" --precision bf16 --reduce-dtype bf16 --wrapper none bucketed torch-ddp zero1 zero2
part traces 150 4 --size "$size" --precision bf16 --trace --wrapper naive "${overlapping[@]}"
part buckets 80 "$steps" --size "$size" --precision bf16 --wrapper bucketed --bucket-mb 1 5 10 50 100 500
part fp32 90 5 --size "$size" --precision fp32 --wrapper none bucketed torch-ddp naive zero3 torch-fsdp
part sizes 190 "$steps" --size "${SIZES:-small,medium,large,xl}" --precision bf16 --wrapper none naive flat "${overlapping[@]}"
[ "$device" = cpu ] || part gloo 40 3 --size small --precision fp32 --wrapper naive bucketed --backend gloo
exit 0
