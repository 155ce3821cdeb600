#!/usr/bin/env bash
# Measures training steps (E1, E3 and E6) on one GPU:
#   benchmarks/step_campaign.sh OUT
# Measures the main rows twice and compares them, which shows their spread, then runs the study. STUDY=0 skips the
# study, ROWS=0 the main rows. Needs an installed stepgauge, or PYTHONPATH=src.
# Writes OUT/rows-{a,b}.jsonl, OUT/repeat.txt and OUT/study-*.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stepgauge() { python3 -m stepgauge "$@"; }

if [ "${ROWS:-1}" = 1 ]; then
  for repeat in a b; do
    common=(--size "${SIZES:-small,2.7b}" --batch 4 --context "${CONTEXT:-512}" --out "$work/$repeat")
    time stepgauge bench step "${common[@]}" --precision fp32 bf16 --steps "${STEPS:-20}"
    time stepgauge bench step "${common[@]}" --precision bf16 --compile on --steps "${STEPS:-20}"
    cp "$work/$repeat/records.jsonl" "$out/rows-$repeat.jsonl"
  done
  stepgauge compare "$work/a" "$work/b" 2>&1 | tee "$out/repeat.txt"
fi
if [ "${STUDY:-1}" = 1 ]; then
  time timeout "${STUDY_SECONDS:-520}" python3 -m stepgauge study --out "$work/study"
  stepgauge report "$work/study" # of the rows so far, if the study reached its limit
  for file in records.jsonl machine.json report.html failures.log; do
    cp "$work/study/$file" "$out/study-$file" 2>/dev/null
  done
fi
exit 0
