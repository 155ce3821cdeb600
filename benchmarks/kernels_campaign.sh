#!/usr/bin/env bash
# Operations and the whole step beside their peers on one GPU, in under 480 s: benchmarks/kernels_campaign.sh OUT
# Needs an installed stepgauge, or PYTHONPATH=src; peers that are importable join. BUDGET=... seconds in all.
# Writes OUT/{step,kernels,op}.jsonl, OUT/tables.txt and OUT/{study,op}.html; the most important part first.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
end=$((SECONDS + ${BUDGET:-470}))
device=${DEVICE:-cuda}
stepgauge() { python3 -m stepgauge "$@"; }

# part SECONDS COMMAND...: no longer than that, and no longer than what is left; its failure is not the end.
part() {
  local limit=$1 left=$((end - SECONDS)); shift
  [ "$left" -gt 5 ] || { echo "no time left for: $*"; return; }
  echo "== $* ($SECONDS s)"
  timeout -k 5 $((limit < left ? limit : left)) python3 -m stepgauge "$@" 2>"$work/err" >>"$out/tables.txt" \
    || { echo "ended with $?"; tail -3 "$work/err"; }
}
collect() { cat "$work"/kernel-*/records.jsonl >"$out/kernels.jsonl" 2>/dev/null; }

# Compiles what follows into the disk caches, several at a time: nothing of it is timed for the record.
warm() {
  timeout -k 5 "${WARM:-75}" python3 -m stepgauge bench kernel "$@" --passes both --seconds 0 --device "$device" \
    --out "$work/warm-$RANDOM$RANDOM" >/dev/null 2>&1 &
}
if [ "${WARM:-75}" != 0 ]; then
  for dtype in bf16 fp32; do
    for width in 64 128 16 32; do
      warm attention --grid attention-heads --dtype $dtype --width $width --sequence 128 1024 4096 16384 --peers ours
    done
  done
  warm attention --grid anchors --peers ours
  warm rms-norm --grid anchors --peers ours compile
  wait
  echo "compiled at $SECONDS s"
fi

part 150 study --only fused-step --device "$device" --out "$work/study"
cp "$work/study/records.jsonl" "$out/step.jsonl" 2>/dev/null
for op in rms-norm linear-cross-entropy adamw attention; do
  part 75 bench kernel $op --grid anchors --seconds 0.1 --device "$device" --out "$work/kernel-$op"
  collect
done
part 100 bench kernel attention --grid attention-heads --seconds 0.03 --device "$device" --out "$work/kernel-heads"
collect
part 30 bench kernel rms-norm --grid norm-layers --seconds 0.05 --device "$device" --out "$work/kernel-norms"
collect
part 45 bench kernel attention --grid attention-batch --peers eager efficient --seconds 0.03 --device "$device" \
  --out "$work/kernel-batch"
collect
part 25 bench op examples/softmax.py:softmax --device "$device" --out "$work/op"
cp "$work/op/report.html" "$out/op.html" 2>/dev/null
[ "$device" = cuda ] && part 90 bench op examples/saxpy.cu --device "$device" --out "$work/op-cu"
cat "$work"/op*/records.jsonl >"$out/op.jsonl" 2>/dev/null
stepgauge report "$work/study" >/dev/null && cp "$work/study/report.html" "$out/study.html"
echo "done at $SECONDS s"
exit 0
