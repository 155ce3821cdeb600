#!/usr/bin/env bash
# Predicts and measures peak memory (E4) on GPUs:
#   benchmarks/memory_campaign.sh OUT
# Covers every size, context, precision and kind of checkpointing, most important first. Each part has its own time
# limit and writes its rows to OUT/memory/PART.jsonl. All parts take 15 minutes on one GPU. Several GPUs of a machine
# can share them; the last command then merges the rows:
#   CUDA_VISIBLE_DEVICES=0 PARTS="size:2.7b size:small compiled:small" benchmarks/memory_campaign.sh OUT &
#   CUDA_VISIBLE_DEVICES=1 PARTS="size:xl checkpointing:2.7b" benchmarks/memory_campaign.sh OUT & ...; wait
#   PARTS=merge benchmarks/memory_campaign.sh OUT
# Needs an installed stepgauge, or PYTHONPATH=src. On a CPU: DEVICE=cpu CONTEXTS="32 64" CONTEXT=32
# PARTS="size:nano checkpointing:nano time:nano parts:nano compiled:nano predict:nano merge"
set -uo pipefail
out=$(mkdir -p "$1/memory" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
device=${DEVICE:-cuda} contexts=${CONTEXTS:-128 512 2048} context=${CONTEXT:-512}
usual="size:small size:2.7b size:medium size:large size:xl checkpointing:small checkpointing:2.7b predict:10b
  compiled:small parts:small fp16:small checkpointing:medium time:small time:2.7b compiled:2.7b parts:2.7b tests merge"

measure() { # SECONDS COMMAND OPTIONS...: runs a stepgauge command; a part has one run folder
  timeout "$1" python3 -m stepgauge "${@:2}" --out "$work/$part" --device "$device" --batch 4 2>&1
}
memory() { measure "$1" profile memory --size "$size" "${@:2}"; }
choices() { # SECONDS COMMAND OPTIONS...: runs a command for each kind of checkpointing, with useful numbers of blocks
  measure "$1" "${@:2}" --size "$size" --precision bf16 --context "$context" --checkpointing none
  measure "$1" "${@:2}" --size "$size" --precision bf16 --context "$context" --checkpointing blocks --checkpoint-blocks 1 2 4 8
  measure "$1" "${@:2}" --size "$size" --precision bf16 --context "$context" --checkpointing nested --checkpoint-blocks 4 8
  measure "$1" "${@:2}" --size "$size" --precision bf16 --context "$context" --checkpointing selective --checkpoint-blocks 1 4
}

run_part() {
  case $part in
    size:*) memory 150 --context $contexts --precision fp32 bf16 ;;
    fp16:*) memory 60 --context $contexts --precision fp16 ;;
    checkpointing:*) choices 60 profile memory ;;
    time:*) choices 40 bench step --steps 10 ;;
    compiled:*)
      memory 120 --context "$context" --precision bf16 --compile on blocks
      memory 90 --context "$context" --precision bf16 --compile on --checkpointing blocks
      ;;
    parts:*) memory 60 --context "$context" --precision fp32 bf16 --norm triton --attention triton --loss fused --optimizer fused ;;
    predict:*) memory 90 --context 512 2048 --precision fp32 bf16 --predict sm90 ;;
    tests) timeout 180 python3 -m pytest -q -m gpu tests/bench/test_memory.py 2>&1 | tail -25 | tee "$out/memory-tests.txt" ;;
    merge) merge ;;
    *) echo "there is no part $part; choose from $usual" ;;
  esac
}

keep() { # copies the rows, failures and report of a part, and one snapshot
  local name=${part//:/-}
  [ -f "$work/$part/records.jsonl" ] || return
  cp "$work/$part/records.jsonl" "$out/memory/$name.jsonl"
  cp "$work/$part/failures.log" "$out/memory/$name-failures.log" 2>/dev/null
  cp "$work/$part/report.html" "$out/memory/$name.html" 2>/dev/null
  if [ "$part" = size:small ]; then
    cp "$(find "$work/$part/snapshots" -name 'small-bf16-512-*' | head -1)" "$out/snapshot.pickle" 2>/dev/null
  fi
}

merge() { # merges all rows into one run: records, tables with predictions, report
  cat "$out"/memory/time-*.jsonl >"$out/checkpointing-time.jsonl" 2>/dev/null
  rm -rf "$work/all" && mkdir -p "$work/all"
  cat $(ls "$out"/memory/*.jsonl | grep -v /time-) >"$work/all/records.jsonl"
  cp "$work/all/records.jsonl" "$out/memory.jsonl"
  python3 -m stepgauge show "$work/all" | tee "$out/tables.txt"
  python3 -m stepgauge report "$work/all" --out "$out/memory.html"
}

for part in ${PARTS:-$usual}; do
  size=${part#*:}
  echo "==== $part" && time run_part
  keep
done 2>&1 | tee -a "$out/memory-log.txt"
exit 0
