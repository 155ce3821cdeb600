#!/usr/bin/env bash
# Tests and measures the Hopper kernels on one GPU:
#   benchmarks/hopper_campaign.sh OUT
# PARTS="rows losses" selects parts. BUDGET=... is their limit in seconds (300 by default). TRIAL=1 runs everything on
# small shapes of a CPU.
#   checks   at the same time: GPU tests of kernels, bench and measure, a compiled step with a checkpointing budget, and
#            compilation for the other parts, into caches
#   losses   linear + cross-entropy: our choice, our compiled loop, torch.compile and eager
#   rows     attention at nine shapes of training, next to FlashAttention-4 and cuDNN
#   host     the eager step of small with our parts and torch's, and the host time of forward by function
#   xl       a step of xl, 8 x 2048
#   float8   the step of xl with torchao's float8 linear layers
#   profile  the kernels of the step of xl, next to their predictions
#   gates    steps with SwiGLU's gate fused into its products (QuACK) and without, in turns: xl, large, 2.7b, width 4096
#   grid     attention over widths and lengths
# Writes OUT/{attention.jsonl,log.txt,checks-*.txt} and a folder of rows per part.
set -uo pipefail
known="checks losses rows host xl float8 profile gates grid"
BUDGET=${BUDGET:-300}
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
attention=$(dirname "$0")/kernels/hopper.py
device=${TRIAL:+cpu}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1  # keeps its compiled kernels on disk

logged() { "$@" 2>&1 | tee -a "$out/log.txt"; }
stepgauge() { timed "$1" python3 -m stepgauge "${@:2}" --device "${device:-cuda}"; }
loss() {  # SECONDS NAME OPTIONS...
  stepgauge "$1" bench kernel linear-cross-entropy --dtype bf16 --passes both --peers ours-compiled eager compile \
    --out "$out/$2" "${@:3}"
}
short="--tokens 2048 --width 2560 --vocabulary 10000"
long="--tokens 16384 --width 4096 --vocabulary 128256"
xl="--size xl --batch 8 --context 2048" times="--warmup 3 --steps 10 --seconds 0 --no-predict"
xl+=" --optimizer fused --attention triton --loss fused --compile blocks"
processes=9 size=small tests="tests/kernels tests/bench tests/measure" alone=tests/bench/test_profile.py
if [ "${TRIAL:-}" ]; then
  short="--tokens 16 --width 16 --vocabulary 64" long=$short processes=2 size=nano tests=tests/train/test_float8.py
  xl="--size nano --batch 1 --context 16 --optimizer fused --compile blocks"
fi
if chosen checks; then
  test="python3 -m pytest -q -p no:cacheprovider -m gpu"
  timed 170 $test -n 7 $tests --ignore $alone >"$out/checks-tests.txt" 2>&1 &
  for ((i = 0; i < processes; i++)); do
    (for shapes in training $(chosen grid && echo grid); do
       timed 100 python3 "$attention" "$out" --compile $i $processes --shapes $shapes ${TRIAL:+--trial}
     done) >"$out/checks-compile-$i.txt" 2>&1 &
  done
  (loss 100 compiled $short --seconds 0; loss 100 compiled $long --seconds 0) >"$out/checks-loss.txt" 2>&1 &
  budget="--size $size --batch 4 --context 512 --compile on --checkpointing none budget --memory-gib 2.4"
  (stepgauge 60 bench step $xl $times --num-layers 2 --precision bf16-master --out "$out/compiled-xl"
   stepgauge 60 bench step $xl $times --num-layers 2 --precision float8 --out "$out/compiled-xl"
   stepgauge 60 bench step $budget --precision bf16 --steps 5 --out "$out/budget") >"$out/checks-steps.txt" 2>&1 &
  wait
  timed 60 $test $alone >>"$out/checks-tests.txt" 2>&1  # compares two clocks: needs an idle GPU
  logged tail -n 15 "$out"/checks-{loss,steps,tests}.txt
fi
if chosen losses; then
  logged loss 60 losses-long $long --seconds 0.3
  logged loss 30 losses-short $short --seconds 0.3
fi
if chosen rows; then
  logged timed 45 python3 "$attention" "$out" --budget 38 ${TRIAL:+--trial}
fi
if chosen host; then
  logged timed 40 python3 "$(dirname "$0")/kernels/host_time.py" "$out" ${TRIAL:+--trial}
fi
if chosen xl; then
  logged stepgauge 60 bench step $xl $times --precision bf16-master --out "$out/xl"
fi
if chosen float8; then
  logged stepgauge 60 bench step $xl $times --precision float8 --out "$out/float8"
fi
if chosen profile; then
  logged stepgauge 70 profile step $xl --precision bf16-master --hardware hardware/h200-sxm.json --out "$out/profile"
fi
if chosen gates; then
  gates="--gate torch quack --precision bf16-master $times --optimizer fused --attention triton --loss fused"
  gates+=" --compile blocks"
  wide="--d-model 4096 --d-ff 14336 --num-layers 12 --num-heads 32 --num-kv-heads 8"
  if [ "${TRIAL:-}" ]; then
    logged stepgauge 60 bench step --size nano --batch 1 --context 16 $gates --out "$out/gates"
  else
    logged timed 60 python3 -m pytest -q -m gpu -p no:cacheprovider tests/kernels/test_swiglu_feed_forward.py
    for turn in 1 2; do
      logged stepgauge 60 bench step --size xl --batch 8 --context 2048 $gates --out "$out/gates-$turn"
      logged stepgauge 60 bench step --size large --batch 16 --context 1024 $gates --out "$out/gates-$turn"
      logged stepgauge 60 bench step --size 2.7b --batch 4 --context 512 $gates --out "$out/gates-$turn"
      logged stepgauge 60 bench step $wide --batch 16 --context 2048 $gates --out "$out/gates-$turn"
    done
  fi
fi
if chosen grid; then
  logged timed 100 python3 "$attention" "$out" --shapes grid --budget $((BUDGET - SECONDS - 8)) ${TRIAL:+--trial}
fi
echo "done at $SECONDS s"
exit 0
