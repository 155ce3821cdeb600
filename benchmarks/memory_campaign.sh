#!/usr/bin/env bash
# E4 on GPUs: benchmarks/memory_campaign.sh OUT
# Predicted beside measured peak of every size, context, precision and checkpointing; each part ends at its own time
# limit and leaves its rows in OUT/memory/PART.jsonl. All parts take some 15 minutes on one GPU, in order of importance;
# several GPUs of a machine share them, and the last command puts the rows together:
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

measure() { # SECONDS, command, then its options: one run a part
  timeout "$1" python3 -m stepgauge "${@:2}" --out "$work/$part" --device "$device" --batch 4 2>&1
}
memory() { measure "$1" profile memory --size "$size" "${@:2}"; }
choices() { # SECONDS, command, options: every checkpointing, with the parts that make sense of each
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
    *) echo "$part is no part; choose from $usual" ;;
  esac
}

keep() { # what is worth keeping of a part: its rows, what failed, its report, one snapshot
  local name=${part//:/-}
  [ -f "$work/$part/records.jsonl" ] || return
  cp "$work/$part/records.jsonl" "$out/memory/$name.jsonl"
  cp "$work/$part/failures.log" "$out/memory/$name-failures.log" 2>/dev/null
  cp "$work/$part/report.html" "$out/memory/$name.html" 2>/dev/null
  if [ "$part" = size:small ]; then
    cp "$(find "$work/$part/snapshots" -name 'small-bf16-512-*' | head -1)" "$out/snapshot.pickle" 2>/dev/null
  fi
}

merge() { # all rows that are there, one report of them, and the errors of every prediction
  cat "$out"/memory/time-*.jsonl >"$out/checkpointing-time.jsonl" 2>/dev/null
  cat $(ls "$out"/memory/*.jsonl | grep -v /time-) >"$out/memory.jsonl"
  python3 - "$out" <<'PYTHON' | tee "$out/errors.txt"
import sys
from pathlib import Path
from stepgauge.report.memory import memory_page
from stepgauge.report.views import names
from stepgauge.spec.record import Record

out = Path(sys.argv[1])
records = [Record.from_json(line) for line in (out / "memory.jsonl").read_text().splitlines()]
records = list({record.key: record for record in records}.values())
(out / "memory.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records))
(out / "memory.html").write_text(memory_page(records), encoding="utf-8")
worst = {"predicted_error": 0.0, "unexplained": 0.0}
for name, record in zip(names(records), records, strict=True):
    peak, predicted = record.median("peak_bytes"), record.median("predicted_peak_bytes")
    error, rest = record.median("predicted_error"), record.median("unexplained_bytes")
    measured = peak if record.provenance == "measured" else None
    gib = ["-" if value is None else f"{value / 2**30:.3f}" for value in (measured, predicted)]
    print(f"{name:60} {record.status:6} peak {gib[0]:>8} predicted {gib[1]:>8}"
          + (f" error {100 * error:+.2f} %" if error is not None else "")
          + (f" unexplained {100 * rest / peak:+.2f} %" if rest is not None and peak else "") + f" {record.note[:60]}")
    if error is not None:
        worst["predicted_error"] = max(worst["predicted_error"], abs(error))
    if rest is not None and peak:
        worst["unexplained"] = max(worst["unexplained"], abs(rest / peak))
print("worst:", ", ".join(f"{name} {100 * value:.2f} %" for name, value in worst.items()))
PYTHON
}

for part in ${PARTS:-$usual}; do
  size=${part#*:}
  echo "==== $part" && time run_part
  keep
done 2>&1 | tee -a "$out/memory-log.txt"
exit 0
