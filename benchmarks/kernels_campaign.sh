#!/usr/bin/env bash
# Operations and the whole step beside their peers on one GPU: benchmarks/kernels_campaign.sh OUT
# Needs an installed stepgauge, or PYTHONPATH=src; peers that are importable join. The anchors of the four operations
# come first and need under 300 s; what follows takes what BUDGET=... seconds leave (470 by default).
# Writes OUT/{step,kernels,op}.jsonl, OUT/tables.txt and OUT/{study,op}.html. Each row is named as it is done, with the
# seconds since the start.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
end=$((SECONDS + ${BUDGET:-470}))
device=${DEVICE:-cuda}
declare -A shape=()
if [ "${TRIAL:-}" ]; then  # everything on small shapes: whether it runs, on any machine
  shape=([rms-norm]="--rows 64 --width 64" [attention]="--batch 1 --heads 2 --sequence 64 --width 16"
         [linear-cross-entropy]="--tokens 64 --width 64 --vocabulary 256" [adamw]="--layers 1 --width 16")
fi

stamped() { while IFS= read -r line; do echo "$(printf %4d $SECONDS) s  $line"; done; }

# part SECONDS COMMAND...: no longer than that, and no longer than what is left; its failure is not the end.
part() {
  local limit=$1 left=$((end - SECONDS)); shift
  [ "$left" -gt 5 ] || { echo "no time left for: $*"; return; }
  echo "== $* ($SECONDS s)"
  timeout -k 5 $((limit < left ? limit : left)) python3 -m stepgauge "$@" 2> >(stamped) >>"$out/tables.txt" \
    || echo "ended with $?"
}
collect() { cat "$work"/kernel-*/records.jsonl >"$out/kernels.jsonl" 2>/dev/null; }
kernel() {  # SECONDS GRID OPERATION OPTIONS...: rows of one grid
  local limit=$1 grid=$2 op=$3; shift 3
  part "$limit" bench kernel "$op" --grid "$grid" --device "$device" --out "$work/kernel-$op-$grid" "$@" ${shape[$op]:-}
  collect
}

# Compiles what the anchors need of ours into the disk cache, several at a time: nothing of it is timed for the record.
warm() {
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

kernel 65 anchors linear-cross-entropy --seconds 0.1
kernel 70 anchors attention --seconds 0.1
kernel 65 anchors rms-norm --seconds 0.1
kernel 20 anchors adamw --seconds 0.1
echo "anchors done at $SECONDS s"
part 120 study --only fused-step --device "$device" --out "$work/study"
cp "$work/study/records.jsonl" "$out/step.jsonl" 2>/dev/null
# One head: bf16 and the lengths between which launches stop to matter first.
kernel 60 attention-heads attention --dtype bf16 --seconds 0.05 \
  --width 64 --sequence 16384 4096 8192 2048 32768 1024
kernel 60 attention-batch attention --peers eager efficient --seconds 0.03 \
  --sequence 1024 4096 16384
kernel 30 norm-layers rms-norm --seconds 0.05
part 25 bench op examples/softmax.py:softmax --device "$device" --out "$work/op"
cp "$work/op/report.html" "$out/op.html" 2>/dev/null
[ "$device" = cuda ] && part 90 bench op examples/saxpy.cu --device "$device" --out "$work/op-cu"
cat "$work"/op*/records.jsonl >"$out/op.jsonl" 2>/dev/null
python3 -m stepgauge report "$work/study" >/dev/null && cp "$work/study/report.html" "$out/study.html"
echo "done at $SECONDS s"
exit 0
