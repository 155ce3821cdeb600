#!/usr/bin/env bash
# float32 attention on one GPU of compute capability 9.0: benchmarks/kernels/fp32_campaign.sh OUT
# PARTS="tests rows before heads narrow long tiles" chooses, in that order, all by default.
# BUDGET=... seconds for all (540 by default).
# tests: float32 and its backward of bf16 parts against float64.
# rows: fp32 at D 64 and 128, full and causal, 8 heads of 4096, beside plain PyTorch and torch's memory-efficient.
# before: the backward of these without bf16 parts (STEPGAUGE_BF16X3=0).
# heads: one head in fp32, where loops are split.
# narrow: one head in bf16 at D 16 and 32, which is split at T 2048 now.
# long: bf16 in sections of heads, causal.
# tiles: other tiles of the kernels of bf16 parts (sweep.py attention-fp32 --field passes=backward).
# Writes OUT/tests.txt, OUT/{rows,before,heads,narrow,long}.jsonl, OUT/tables.txt and OUT/tiles-*/sweep.jsonl.
set -uo pipefail
known="tests rows before heads narrow long tiles"
cd "$(dirname "$0")/../.."
. benchmarks/parts.sh
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
device=${DEVICE:-cuda}
shape="--batch 8 --heads 1 --sequence 4096 --width 128 64 --causal false true"
lengths="512 2048 8192 32768" seconds=0.05
long="--batch 1 --heads 16 --sequence 16384 --width 64 128" tiles=""
if [ "${TRIAL:-}" ]; then  # everything on small shapes: whether it runs, on any machine
  shape="--batch 1 --heads 1 --sequence 32 --width 64 --causal false true"
  lengths=32 seconds=0 long="--batch 1 --heads 2 --sequence 32 --width 64" tiles="--field sequence=32"
fi

rows() {  # SECONDS NAME OPTIONS...: rows of one run
  local limit=$1 name=$2; shift 2
  timed "$limit" python3 -m stepgauge bench kernel attention "$@" --seconds "$seconds" --device "$device" \
    --out "$work/$name" 2>&1 | tee -a "$out/tables.txt"
  cp "$work/$name/records.jsonl" "$out/$name.jsonl" 2>/dev/null
}

if chosen tests; then
  gpu_tests="python3 -m pytest -m gpu -q -p no:cacheprovider"
  timed 250 $gpu_tests tests/kernels/test_attention_bf16x3.py 2>&1 | tee "$out/tests.txt"
  timed 250 $gpu_tests tests/kernels/test_attention.py -k "float32" 2>&1 | tee -a "$out/tests.txt"
fi
chosen rows && rows 120 rows $shape --dtype fp32 --passes forward backward --peers eager efficient
chosen before && STEPGAUGE_BF16X3=0 rows 60 before $shape --dtype fp32 --passes backward --peers eager
chosen heads && rows 100 heads --grid attention-heads --dtype fp32 --width 128 64 --sequence $lengths --peers efficient
chosen narrow && rows 80 narrow --grid attention-heads --dtype bf16 --width 16 32 --sequence $lengths --peers fa2
chosen long && rows 60 long $long --dtype bf16 --passes forward backward --peers fa2 cudnn
if chosen tiles; then
  for width in 128 64; do
    timed 80 python3 benchmarks/kernels/sweep.py "$out/tiles-$width" attention-fp32 --device "$device" --budget 60 \
      --field width="$width" --field passes=backward $tiles
  done
fi
echo "done at $SECONDS s"
exit 0
