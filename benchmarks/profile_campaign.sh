#!/usr/bin/env bash
# E2 on one GPU: benchmarks/profile_campaign.sh OUT
# Small and 2.7b × contexts × precisions under the profiler; what it costs; the GPU tests of the profiler.
# Needs an installed stepgauge, or PYTHONPATH=src. Sizes, contexts, seconds and the device can be set as below.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

profile() { # SECONDS, then options: rows that were measured before the time ran out are kept
  timeout "$1" python3 -m stepgauge profile step --batch "${BATCH:-4}" --device "${DEVICE:-auto}" \
    --warmup 2 --steps 3 --seconds 0.3 --out "$work/run" "${@:2}" >>"$out/profile-phases.txt" 2>>"$out/profile-log.txt"
}

profile_time() {
  # Eager attention shows scores, softmax and values apart; sdpa is what one would train with.
  for size in ${SIZES:-small 2.7b}; do
    for precision in ${PRECISIONS:-bf16 fp32}; do
      profile 45 --size "$size" --precision "$precision" --context ${CONTEXTS:-512 128 2048} --attention eager
    done
  done
  profile 50 --size ${SIZES:-small 2.7b} --precision bf16 --context 512 --attention sdpa --compile off on
}

profile_keep() {
  cp "$work/run/records.jsonl" "$out/profile-records.jsonl"
  cp "$work/run/failures.log" "$out/profile-failures.log" 2>/dev/null
  python3 - "$work/run" "$out" <<'PY'
import sys
from pathlib import Path
from stepgauge.bench.profile import read, write_report
from stepgauge.spec.store import RunStore
run, out = map(Path, sys.argv[1:])
records = RunStore(run).read().latest()
write_report([(record, read(record, run)) for record in records], out).rename(out / "profile-report.html")
PY
  (cd "$work/run/profiles" && tar czf "$out/profile-analyses.tar.gz" ./*/analysis.json)
  # The full tables of each row, for reading.
  for folder in "$work"/run/profiles/*/; do
    echo "==== $(basename "$folder")" >>"$out/profile-tables.txt"
    python3 - "$folder/analysis.json" >>"$out/profile-tables.txt" <<'PY'
import sys
from stepgauge.cli.console import print_table
from stepgauge.report.profile import sentences, tables
from stepgauge.spec.analysis import Analysis
found = Analysis.from_json(open(sys.argv[1]).read())
for table in tables(found):
    print_table(table)
    print()
print(*sentences(found), sep="\n")
PY
  done
  smallest=$(ls -S "$work"/run/profiles/*/trace.json.gz | tail -1)
  [ "$(stat -c %s "$smallest")" -lt 5000000 ] && cp "$smallest" "$out/profile-trace.json.gz"
}

time timeout 45 python3 -m pytest -q -m gpu tests/bench/test_profile.py 2>&1 | tail -25 | tee "$out/profile-tests.txt"
time profile_time
time profile_keep
exit 0
