#!/usr/bin/env bash
# Attention launched from C++ in compiled graphs and in float32, on one GPU: benchmarks/kernels/native_campaign.sh OUT
# PARTS="tests host step heads" chooses, in that order, all by default; BUDGET=... seconds for all (420 by default).
# tests: the same bits as Python's, eager and compiled, in bf16, fp32 and tf32, and what else C++ could disturb.
# host: µs of host time a call of the operators, from C++, from Python, and the built-in's.
# step: small compiled, attention alone and all parts ours beside stock, twice, and without C++ (STEPGAUGE_EXTENSION=0).
# heads: E7(c) in fp32 where launches are all there is, beside plain PyTorch; then the same lengths in bf16.
# Writes OUT/tests.txt, OUT/host.{json,txt}, OUT/{step,heads}.jsonl and OUT/tables.txt.
set -uo pipefail
known="tests host step heads"
cd "$(dirname "$0")/../.."
BUDGET=${BUDGET:-420}
. benchmarks/parts.sh
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
device=${DEVICE:-cuda}
step="--size small --batch 4 --context 512 --precision bf16 --compile on --steps 100 --seconds 3"
lengths="128 256 512 1024 2048" widths="64 128 16 32" seconds=0.03
if [ "${TRIAL:-}" ]; then  # everything on small shapes: whether it runs, on any machine
  step="--size nano --batch 1 --context 16 --steps 1 --seconds 0"
  lengths=32 widths=16 seconds=0
fi

rows() {  # SECONDS NAME COMMAND...: rows of one run
  local limit=$1 name=$2; shift 2
  timed "$limit" python3 -m stepgauge "$@" --device "$device" --out "$work/$name" 2>&1 | tee -a "$out/tables.txt"
  cat "$work/${name%%-*}"-*/records.jsonl >"$out/${name%%-*}.jsonl" 2>/dev/null
}

if chosen tests; then
  timed 150 python3 -m pytest -m gpu -q -p no:cacheprovider tests/kernels/test_attention.py \
    -k "cpp_equals_python or compile_and_second_launch or tf32_when or no_synchronisation" 2>&1 | tee "$out/tests.txt"
fi
if chosen host; then
  calls="" && [ "${TRIAL:-}" ] && calls="--calls 1 --rounds 1"
  timed 60 python3 benchmarks/kernels/operator_host_time.py "$out/host.json" --device "$device" $calls 2>&1 \
    | tee "$out/host.txt"
fi
if chosen step; then
  for repeat in a b; do
    rows 60 "step-attention-$repeat" bench step $step --attention sdpa triton
    rows 45 "step-all-$repeat" bench step $step --attention triton --norm triton --loss fused --optimizer fused
  done
  STEPGAUGE_EXTENSION=0 rows 45 step-python bench step $step --attention triton
fi
if chosen heads; then
  for width in $widths; do
    rows 60 "heads-fp32-$width" bench kernel attention --grid attention-heads --dtype fp32 --width "$width" \
      --sequence $lengths --peers eager --seconds "$seconds"
  done
  rows 40 heads-bf16 bench kernel attention --grid attention-heads --dtype bf16 --width 64 --sequence $lengths \
    --peers eager --seconds "$seconds"
fi
echo "done at $SECONDS s"
exit 0
