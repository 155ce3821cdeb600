#!/usr/bin/env bash
# Tests and measures float32 attention on one GPU of compute capability 9.0:
#   benchmarks/kernels/fp32_campaign.sh OUT
# PARTS="tests rows before heads narrow long tiles" selects parts; all by default, in this order. BUDGET=... is their
# limit in seconds (540 by default). TRIAL=1 uses small shapes. Shapes: D head width, T sequence.
#   tests   compares float32, and its backward with operands split into bf16 parts, with float64
#   rows    fp32 at D 64 and 128, full and causal, 8 heads, T 4096, next to eager PyTorch and its memory-efficient kernel
#   before  the backward of these without bf16 parts (STEPGAUGE_BF16X3=0)
#   heads   one head in fp32, where loops are split
#   narrow  one head in bf16 at D 16 and 32, where loops are split at T 2048
#   long    bf16, causal, 16 heads, T 16,384
#   tiles   other tiles for the backward kernels with bf16 parts (sweep.py attention-fp32 --field passes=backward)
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
if [ "${TRIAL:-}" ]; then  # small shapes, to check on any machine that everything runs
  shape="--batch 1 --heads 1 --sequence 32 --width 64 --causal false true"
  lengths=32 seconds=0 long="--batch 1 --heads 2 --sequence 32 --width 64" tiles="--field sequence=32"
fi

rows() {  # SECONDS NAME OPTIONS...: measures attention and writes the rows to OUT/NAME.jsonl
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
