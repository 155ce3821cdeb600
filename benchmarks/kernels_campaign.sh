#!/usr/bin/env bash
# Measures operations and the whole step next to their peers on one GPU:
#   benchmarks/kernels_campaign.sh OUT
# PARTS="attention heads" selects parts; all by default, in this order. BUDGET=... is their limit in seconds (470 by
# default). TRIAL=1 uses small shapes; DEVICE=cpu runs without a GPU.
#   linear-cross-entropy, attention, rms-norm, adamw   anchor shapes, under 300 s together
#   step         the step with fused parts
#   heads        attention with one head
#   batch        attention with batch 8 and one head in fp32, over lengths and widths
#   norm-layers  norms as layers of a network
#   op           a user's own operations from examples/
# Several GPUs of one machine can run different parts at the same time, each with its own CUDA_VISIBLE_DEVICES and OUT.
# Needs an installed stepgauge, or PYTHONPATH=src. Measures the peers that can be imported.
# Writes OUT/{step,kernels,op}.jsonl, OUT/tables.txt and OUT/{study,op}.html. Prints each row when it is measured, with
# the seconds since the start.
set -uo pipefail
BUDGET=${BUDGET:-470}
known="linear-cross-entropy attention rms-norm adamw step heads batch norm-layers op"
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
device=${DEVICE:-cuda}
declare -A shape=()
if [ "${TRIAL:-}" ]; then  # small shapes, to check on any machine that everything runs
  shape=([rms-norm]="--rows 64 --width 64" [attention]="--batch 1 --heads 2 --sequence 64 --width 16"
         [linear-cross-entropy]="--tokens 64 --width 64 --vocabulary 256" [adamw]="--layers 1 --width 16")
fi

stamped() { while IFS= read -r line; do echo "$(printf %4d $SECONDS) s  $line"; done; }

stepgauge() {  # SECONDS OPTIONS...: writes tables to a file and messages to the screen
  local limit=$1; shift
  timed "$limit" python3 -m stepgauge "$@" 2> >(stamped) >>"$out/tables.txt"
}
kernel() {  # PART SECONDS GRID OPERATION OPTIONS...: measures the rows of one grid
  local name=$1 limit=$2 grid=$3 op=$4; shift 4
  chosen "$name" || return 0
  stepgauge "$limit" bench kernel "$op" --grid "$grid" --device "$device" --out "$work/kernel-$name" "$@" ${shape[$op]:-}
  cat "$work"/kernel-*/records.jsonl >"$out/kernels.jsonl" 2>/dev/null
}

# Compiles our kernels for the anchors into the disk caches, several at the same time. Its times are not kept.
warm() {
  chosen "$1" || return 0
  timeout -k 5 "$warm" python3 -m stepgauge bench kernel "$@" --grid anchors --peers ours --seconds 0 \
    --device "$device" --out "$work/warm-$RANDOM$RANDOM" ${shape[$1]:-} >/dev/null 2>&1 &
}
warm=${WARM:-40}
if [ "$warm" != 0 ]; then
  warm attention --width 64 --sequence 2048
  warm attention --width 128 --sequence 2048
  warm rms-norm
  warm adamw
  wait
  echo "compiled at $SECONDS s"
fi

kernel linear-cross-entropy 65 anchors linear-cross-entropy --seconds 0.1
kernel attention 70 anchors attention --seconds 0.1
kernel rms-norm 65 anchors rms-norm --seconds 0.1
kernel adamw 20 anchors adamw --seconds 0.1
if chosen step; then
  stepgauge 120 study --only fused-step --device "$device" --out "$work/study"
  cp "$work/study/records.jsonl" "$out/step.jsonl" 2>/dev/null
  python3 -m stepgauge report "$work/study" >/dev/null && cp "$work/study/report.html" "$out/study.html"
fi
# One head in bf16. The first lengths are those between which launch overhead stops to matter.
kernel heads 60 attention-heads attention --dtype bf16 --seconds 0.05 --width 64 \
  --sequence 16384 4096 8192 2048 32768 1024
kernel batch 60 attention-batch attention --peers eager efficient --seconds 0.03 --sequence 1024 4096 16384
kernel norm-layers 30 norm-layers rms-norm --seconds 0.05
if chosen op; then
  stepgauge 25 bench op examples/softmax.py:softmax --device "$device" --out "$work/op"
  cp "$work/op/report.html" "$out/op.html" 2>/dev/null
  [ "$device" = cuda ] && stepgauge 90 bench op examples/saxpy.cu --device "$device" --out "$work/op-cu"
  cat "$work"/op*/records.jsonl >"$out/op.jsonl" 2>/dev/null
fi
echo "done at $SECONDS s"
exit 0
