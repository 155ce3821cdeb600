#!/usr/bin/env bash
# Profiles training steps (E2) on GPUs:
#   benchmarks/profile_campaign.sh OUT
# Covers the sizes small and 2.7b at several contexts and precisions, the cost of the profiler, and its GPU tests, most
# important first. Each part has its own time limit and writes its run to OUT/profile/PART. All parts take 7 minutes on
# one GPU. Several GPUs of a machine can share them; the last command then merges the rows:
#   CUDA_VISIBLE_DEVICES=0 PARTS="2.7b:fp32 small:bf16" benchmarks/profile_campaign.sh OUT &
#   CUDA_VISIBLE_DEVICES=1 PARTS="2.7b:bf16 small:fp32 fused long" benchmarks/profile_campaign.sh OUT & ...; wait
#   PARTS=merge benchmarks/profile_campaign.sh OUT
# Needs an installed stepgauge, or PYTHONPATH=src. On a CPU: DEVICE=cpu CONTEXTS="16 32" CONTEXT=16 LONGEST=64
# SIZES=nano LARGEST=nano PARTS="nano:bf16 nano:fp32 fused long merge"
set -uo pipefail
out=$(mkdir -p "$1/profile" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
usual="2.7b:bf16 2.7b:fp32 small:bf16 small:fp32 fused long tests merge"

profile() { # SECONDS OPTIONS...: profiles steps; keeps the rows measured within the limit
  timeout "$1" python3 -m stepgauge profile step --batch "${BATCH:-4}" --device "${DEVICE:-auto}" \
    --warmup 2 --steps 3 --seconds 0.3 --out "$work/$part" "${@:2}"
}

run_part() {
  case $part in
    # Fused attention, as in training. The other parts use eager attention, which has separate kernels for scores,
    # softmax and values.
    fused) profile 120 --size ${SIZES:-small 2.7b} --precision bf16 --context "${CONTEXT:-512}" --attention sdpa --compile off on ;;
    # Eager attention of the largest size may not fit at the longest context, so these rows use fused attention.
    long) profile 90 --size ${LARGEST:-2.7b} --precision bf16 fp32 --context "${LONGEST:-2048}" --attention sdpa ;;
    tests) timeout 60 python3 -m pytest -q -m gpu tests/bench/test_profile.py | tail -25 | tee "$out/profile-tests.txt" ;;
    merge) merge ;;
    *:*) profile 120 --size "${part%:*}" --precision "${part#*:}" --context ${CONTEXTS:-512 128 2048} --attention eager ;;
    *) echo "there is no part $part; choose from $usual, or SIZE:PRECISION" ;;
  esac
}

keep() { # copies the rows, analyses and failures of a part, and the first small trace
  [ -f "$work/$part/records.jsonl" ] || return
  local kept=$out/profile/${part//:/-} trace
  for trace in $(ls -Sr "$work/$part"/profiles/*/trace.json.gz 2>/dev/null | head -1); do
    [ "$(stat -c %s "$trace")" -lt 5000000 ] && [ ! -f "$out/profile-trace.json.gz" ] && cp "$trace" "$out/profile-trace.json.gz"
  done
  rm -rf "$kept" && mkdir -p "$kept"
  (cd "$work/$part" && cp -r --parents records.jsonl profiles/*/analysis.json $(ls failures.log 2>/dev/null) "$kept")
}

merge() { # merges all parts into one run: records, report, analyses, and tables as text
  rm -rf "$work/all" && mkdir -p "$work/all/profiles"
  cat "$out"/profile/*/records.jsonl >"$work/all/records.jsonl"
  cp -r "$out"/profile/*/profiles/* "$work/all/profiles/"
  cp "$work/all/records.jsonl" "$out/profile-records.jsonl"
  (cd "$work/all/profiles" && tar czf "$out/profile-analyses.tar.gz" ./*/analysis.json)
  python3 - "$work/all" "$out" <<'PYTHON' >"$out/profile-tables.txt"
import sys
from pathlib import Path
from stepgauge.cli.console import print_table
from stepgauge.report.names import labels
from stepgauge.report.profile import sentences, tables
from stepgauge.report.profile_page import read
from stepgauge.report.run_page import run_page
from stepgauge.spec.store import RunStore

run, out = map(Path, sys.argv[1:])
found = [(record, read(record, run)) for record in RunStore(run).read().latest()]
run_page([record for record, _ in found], run).write(out / "profile-report.html")
for name, (record, analysis) in zip(labels([record for record, _ in found]), found, strict=True):
    print(f"==== {name}" + ("" if analysis else f": {record.status}, {record.note}"))
    for table in tables(analysis) if analysis else []:
        print_table(table)
        print()
    print(*(sentences(analysis) if analysis else []), sep="\n")
PYTHON
}

for part in ${PARTS:-$usual}; do
  echo "==== $part" && time run_part
  keep
done 2>&1 | tee -a "$out/profile-log.txt"
exit 0
