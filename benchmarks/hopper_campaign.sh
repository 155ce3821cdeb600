#!/usr/bin/env bash
# What the kernels of Hopper have to show on one GPU: benchmarks/hopper_campaign.sh OUT
# PARTS="rows losses" chooses, within BUDGET=... seconds (240 by default). TRIAL=1 tries it all on a CPU, small.
#   checks   side by side: GPU tests of the libraries, a float8 step, a checkpointing budget of a compiled step;
#            and what the other parts compile, into caches
#   rows     attention at nine shapes of training beside FlashAttention-4 and cuDNN
#   losses   linear + cross-entropy by our choice, our loop compiled, torch.compile and eager
#   grid     attention over widths and lengths
# Writes OUT/{attention.jsonl,log.txt,checks-*.txt} and runs under OUT.
set -uo pipefail
known="checks rows losses grid"
BUDGET=${BUDGET:-240}
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
attention=$(dirname "$0")/kernels/hopper.py
device=${TRIAL:+cpu}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1  # of the kernels that it compiles, on disk

logged() { "$@" 2>&1 | tee -a "$out/log.txt"; }
stepgauge() { timed "$1" python3 -m stepgauge "${@:2}" --device "${device:-cuda}"; }
loss() {  # SECONDS NAME OPTIONS...
  stepgauge "$1" bench kernel linear-cross-entropy --dtype bf16 --passes both --peers ours-compiled eager compile \
    --out "$out/$2" "${@:3}"
}
short="--tokens 2048 --width 2560 --vocabulary 10000"
long="--tokens 16384 --width 4096 --vocabulary 128256"
processes=14 size=small
[ "${TRIAL:-}" ] && { short="--tokens 16 --width 16 --vocabulary 64"; long=$short; processes=2 size=nano; }

if chosen checks; then
  for ((i = 0; i < processes; i++)); do
    timed 100 python3 "$attention" "$out" --compile $i $processes ${TRIAL:+--trial} >"$out/checks-compile-$i.txt" 2>&1 &
  done
  loss 100 compiled $short --seconds 0 >"$out/checks-loss.txt" 2>&1 &
  step="bench step --size $size --batch 4 --context 512 --steps 5 --compile on --precision bf16"
  stepgauge 100 $step float8 --out "$out/float8" >"$out/checks-float8.txt" 2>&1 &
  stepgauge 100 $step --checkpointing none budget --memory-gib 2.4 --out "$out/budget" >"$out/checks-budget.txt" 2>&1 &
  timed 100 python3 -m pytest -q -p no:cacheprovider -m gpu tests/kernels/test_attention_libraries.py \
    tests/kernels/test_linear_cross_entropy_by_torch.py tests/train/test_float8.py >"$out/checks-tests.txt" 2>&1 &
  wait
  logged tail -n 15 "$out"/checks-[flbt]*.txt
fi
if chosen rows; then
  logged timed 60 python3 "$attention" "$out" --budget 50 ${TRIAL:+--trial}
fi
if chosen losses; then
  logged loss 45 losses-long $long --seconds 0.3
  logged loss 25 losses-short $short --seconds 0.3
fi
if chosen grid; then
  logged timed 100 python3 "$attention" "$out" --grid --budget $((BUDGET - SECONDS - 8)) ${TRIAL:+--trial}
fi
echo "done at $SECONDS s"
exit 0
