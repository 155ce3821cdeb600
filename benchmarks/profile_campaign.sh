#!/usr/bin/env bash
# E2 on GPUs: benchmarks/profile_campaign.sh OUT
# Small and 2.7b × contexts × precisions under the profiler, what it costs, and the GPU tests of the profiler. Each part
# ends at its own time limit and leaves its run in OUT/profile/PART. All parts take some 7 minutes on one GPU, in order
# of importance; several GPUs of a machine share them, and the last command puts the rows together:
#   CUDA_VISIBLE_DEVICES=0 PARTS="2.7b:fp32 small:bf16" benchmarks/profile_campaign.sh OUT &
#   CUDA_VISIBLE_DEVICES=1 PARTS="2.7b:bf16 small:fp32 fused long" benchmarks/profile_campaign.sh OUT & ...; wait
#   PARTS=merge benchmarks/profile_campaign.sh OUT
# Needs an installed stepgauge, or PYTHONPATH=src.
# On a CPU: DEVICE=cpu CONTEXTS="16 32" CONTEXT=16 LONGEST=64 SIZES=nano LARGEST=nano PARTS="nano:bf16 nano:fp32 fused long merge"
set -uo pipefail
out=$(mkdir -p "$1/profile" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
usual="2.7b:bf16 2.7b:fp32 small:bf16 small:fp32 fused long tests merge"

profile() { # SECONDS, then options: rows that were measured before the time ran out are kept
  timeout "$1" python3 -m stepgauge profile step --batch "${BATCH:-4}" --device "${DEVICE:-auto}" \
    --warmup 2 --steps 3 --seconds 0.3 --out "$work/$part" "${@:2}"
}

run_part() {
  case $part in
    # What one would train with; the other parts' eager attention shows scores, softmax and values apart.
    fused) profile 120 --size ${SIZES:-small 2.7b} --precision bf16 --context "${CONTEXT:-512}" --attention sdpa --compile off on ;;
    # Eager attention of the largest may not fit at the longest context: its rows without the scores.
    long) profile 90 --size ${LARGEST:-2.7b} --precision bf16 fp32 --context "${LONGEST:-2048}" --attention sdpa ;;
    tests) timeout 60 python3 -m pytest -q -m gpu tests/bench/test_profile.py | tail -25 | tee "$out/profile-tests.txt" ;;
    merge) merge ;;
    *:*) profile 120 --size "${part%:*}" --precision "${part#*:}" --context ${CONTEXTS:-512 128 2048} --attention eager ;;
    *) echo "$part is no part; choose from $usual, or SIZE:PRECISION" ;;
  esac
}

keep() { # of a part its rows and analyses, what failed, and the first trace that is small
  [ -f "$work/$part/records.jsonl" ] || return
  local kept=$out/profile/${part//:/-} trace
  for trace in $(ls -Sr "$work/$part"/profiles/*/trace.json.gz 2>/dev/null | head -1); do
    [ "$(stat -c %s "$trace")" -lt 5000000 ] && [ ! -f "$out/profile-trace.json.gz" ] && cp "$trace" "$out/profile-trace.json.gz"
  done
  rm -rf "$kept" && mkdir -p "$kept"
  (cd "$work/$part" && cp -r --parents records.jsonl profiles/*/analysis.json $(ls failures.log 2>/dev/null) "$kept")
}

merge() { # one run of all parts: records, report, analyses, and the tables as text
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
