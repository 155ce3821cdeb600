#!/usr/bin/env bash
# The figures of E4 on one GPU: benchmarks/memory_campaign.sh OUT
# Predicted beside measured peak of every size, context, precision and checkpointing, the most important rows first; each
# part ends at its own time limit and leaves its rows. Needs an installed stepgauge, or PYTHONPATH=src. On a CPU:
# SIZES=nano MORE=tiny CONTEXTS="32 64" PREDICT=nano DEVICE=cpu benchmarks/memory_campaign.sh OUT
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sizes=${SIZES:-small 2.7b} more=${MORE:-medium large xl} contexts=${CONTEXTS:-128 512 2048} device=${DEVICE:-cuda}
memory() { # SECONDS, then options; all rows go to one run
  timeout "$1" python3 -m stepgauge profile memory --out "$work/run" --device "$device" --batch 4 "${@:2}" 2>&1
}

{
  time memory 75 --size $sizes --context $contexts --precision fp32 bf16
  time memory 40 --size $sizes --context ${CONTEXT:-512} --precision bf16 --checkpointing blocks --checkpoint-blocks 1 4 8
  time memory 30 --size $sizes --context ${CONTEXT:-512} --precision bf16 --checkpointing nested selective
  time memory 40 --size $more --context ${contexts% *} --precision fp32 bf16
  time memory 15 --size ${PREDICT:-10b 2.7b} --context ${contexts##* } --precision bf16 --predict sm90
  time timeout 25 python3 -m stepgauge bench step --out "$work/time" --device "$device" --size ${sizes%% *} --batch 4 \
    --context ${CONTEXT:-512} --precision bf16 --checkpointing none blocks nested selective --checkpoint-blocks 4 --steps 10
  time memory 15 --size ${sizes%% *} --context ${CONTEXT:-512} --precision bf16 --compile on
} | tee "$out/log.txt"

cp "$work/run/records.jsonl" "$out/memory.jsonl"
cp "$work/run/failures.log" "$work/run/report.html" "$out/" 2>/dev/null
cp "$work/time/records.jsonl" "$out/checkpointing-time.jsonl" 2>/dev/null
cp "$(find "$work/run/snapshots" -name 'small-bf16-512-*' 2>/dev/null | head -1)" "$out/snapshot.pickle" 2>/dev/null
python3 - "$out/memory.jsonl" <<'PYTHON' | tee "$out/errors.txt"
import sys
from pathlib import Path
from stepgauge.report.views import flatten
from stepgauge.spec.record import Record

worst = {"predicted_error": 0.0, "unexplained": 0.0}
for record in map(Record.from_json, Path(sys.argv[1]).read_text().splitlines()):
    spec = flatten(record.spec)
    name = " ".join(str(spec[n]) for n in ("size", "context_length", "precision", "checkpointing", "checkpoint_blocks", "compile"))
    peak, predicted = record.median("peak_bytes"), record.median("predicted_peak_bytes")
    error, rest = record.median("predicted_error"), record.median("unexplained_bytes")
    gib = ["-" if value is None else f"{value / 2**30:.3f}" for value in (peak, predicted)]
    print(f"{name:44} {record.status:6} measured {gib[0]:>8} predicted {gib[1]:>8}"
          + (f" error {100 * error:+.2f} %" if error is not None else "")
          + (f" unexplained {100 * rest / peak:+.2f} %" if rest is not None and peak else "") + f" {record.note[:60]}")
    if error is not None:
        worst["predicted_error"] = max(worst["predicted_error"], abs(error))
    if rest is not None and peak:
        worst["unexplained"] = max(worst["unexplained"], abs(rest / peak))
print("worst:", ", ".join(f"{name} {100 * value:.2f} %" for name, value in worst.items()))
PYTHON
exit 0
