#!/usr/bin/env bash
# Layouts on GPUs of one host, each beside its prediction: benchmarks/layout_campaign.sh OUT
# PARTS="tests two" chooses; by default all, most important first, within BUDGET=... seconds (540 by default). Four ranks
# and more are left out where there are fewer GPUs. TRIAL=1 runs everything on small shapes of a CPU.
#   tests      tests/parallel that need GPUs
#   calibrate  the hardware file that predicts the rows
#   two        each axis alone on two GPUs, of one batch
#   context    one long sequence on one GPU, and cut over two
#   tensor     tensor parallel beside torch's own, plain and asynchronous
#   four       pairs of axes on four GPUs
#   eight      an 8 B network under every layout of four GPUs that holds it
# Writes OUT/{records.jsonl,tables.txt,log.txt,hardware.json,tests.txt,tensor_parallel.jsonl,report.html}.
set -uo pipefail
known="tests calibrate two context tensor four eight"
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
device=cuda network=(--size 2.7b --context 2048 --batch 8) long=(--size 2.7b --context 32768 --batch 1)
large=(--d-model 4096 --d-ff 14336 --num-layers 32 --num-heads 32 --num-kv-heads 8 --vocab-size 128256
       --context 4096 --batch 8)
common=(--precision bf16 --attention triton --steps 10)
if [ "${TRIAL:-}" ]; then
  device=cpu gpus=2 network=(--size nano --num-layers 4 --context 32 --batch 8) large=("${network[@]}")
  long=(--size nano --context 128 --batch 1) common=(--attention triton --steps 2)
fi
hardware=()

layouts() {  # NAME SECONDS OPTIONS...: rows of bench layout
  local name=$1 limit=$2; shift 2
  chosen "$name" || return 0
  [ -e "$out/hardware.json" ] && hardware=(--hardware "$out/hardware.json")
  timed "$limit" python3 -m stepgauge bench layout --device "$device" "${common[@]}" "${hardware[@]}" "$@" \
    --out "$work/layouts" >>"$out/tables.txt" 2> >(tee -a "$out/log.txt" >&2)
  cp "$work/layouts/records.jsonl" "$out/" 2>/dev/null
}

if chosen tests; then timed 200 python3 -m pytest -m gpu -q -p no:cacheprovider tests/parallel 2>&1 | tee "$out/tests.txt"; fi
if chosen calibrate; then
  timed 240 python3 -m stepgauge calibrate "$out/hardware.json" --device "$device" --ranks 2 --out "$work/calibration" \
    >>"$out/tables.txt" 2> >(tee -a "$out/log.txt" >&2)
fi
layouts two 200 "${network[@]}" --layout none "dp2 bucketed" "dp2 zero1" "dp2 zero2" "dp2 zero3" tp2 \
  "pp2 1f1b m8" "pp2 zbv m8"
layouts context 90 "${long[@]}" --layout none cp2
if chosen tensor; then
  OUT="$out" timed 120 python3 benchmarks/tensor_parallel_campaign.py ${TRIAL:+--small}
fi
if [ "$gpus" -ge 4 ]; then
  layouts four 240 "${network[@]}" --layout "dp2 zero3 tp2" "dp4 zero3" tp4 "pp4 zbv m8" "dp2 zero1 pp2 zbv m4" \
    "tp2 pp2 1f1b m8"
  layouts eight 240 "${large[@]}" --layout "dp4 zero3" "dp2 zero3 tp2" tp4 "pp2 1f1b m8 tp2" "pp4 1f1b m8"
fi
[ -e "$work/layouts/records.jsonl" ] && python3 -m stepgauge report "$work/layouts" >/dev/null \
  && cp "$work/layouts/report.html" "$out/"
echo "done at $SECONDS s"
exit 0
