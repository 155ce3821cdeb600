#!/usr/bin/env bash
# Measures whole training steps on Hopper, with our parts and torch's in the same run:
#   benchmarks/steps_on_hopper.sh OUT
# PARTS="short xl" selects parts. BUDGET=... is their limit in seconds (400 by default). TRIAL=1 runs everything on
# small shapes of a CPU.
#   short       2.7b, 4 x 512: one GPU
#   xl          xl, 8 x 2048: one GPU with 141 GB
#   wide        1 to 8 B parameters in blocks of width 4096 and 8192: one GPU with 141 GB
#   long        8 B parameters, one sequence of 32,768 tokens per rank: two GPUs with 141 GB
#   long-torch  the same with torch's parts
#   plans       the step of long under several plans of what backward recomputes, with a trace of the first plan, clocks
#               and power
# Torch's parts are autocast, AdamW, cuDNN attention and cross-entropy. In long-torch they are fully_shard with every
# block recomputed, and our loss, because torch's does not fit. Writes OUT/{records.jsonl,tables.txt,log.txt}.
set -uo pipefail
known="plans long long-torch short xl wide"
BUDGET=${BUDGET:-400}
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

rows() {  # SECONDS COMMAND OPTIONS...: appends the rows of a bench command to OUT/records.jsonl
  local limit=$1 folder; shift
  folder=$(mktemp -d)
  timed "$((limit * patience))" python3 -m stepgauge bench "$@" --device "$device" --no-predict --out "$folder" \
    >>"$out/tables.txt" 2> >(tee -a "$out/log.txt" >&2)
  cat "$folder/records.jsonl" >>"$out/records.jsonl" 2>/dev/null
  cat "$folder/failures.log" >>"$out/failures.txt" 2>/dev/null
  rm -rf "$folder"
}

device=cuda patience=1 trial= stock=sdpa-cudnn times="--warmup 3 --steps 10 --seconds 0"
short="--size 2.7b --batch 4 --context 512" xl="--size xl --batch 8 --context 2048"
narrow="--d-model 4096 --d-ff 14336 --num-layers 12 --num-heads 32 --num-kv-heads 8 --batch 16 --context 2048"
wide="--d-model 8192 --d-ff 28672 --num-layers 4 --num-heads 64 --num-kv-heads 8 --batch 16 --context 2048"
long="--d-model 4096 --d-ff 11008 --num-layers 34 --num-heads 32 --vocab-size 151936 --context 32768 --batch 2"
few="--warmup 2 --steps 3"
if [ "${TRIAL:-}" ]; then
  small="--d-model 64 --d-ff 128 --num-layers 2 --num-heads 2 --batch 2 --context 32"
  device=cpu patience=4 trial=--trial BUDGET=3000 stock=sdpa times="--warmup 1 --steps 1 --seconds 0" few="--warmup 1 --steps 1"
  short=$small xl=$small narrow=$small wide=$small long=$small
fi
torchs="--precision bf16 --optimizer adamw --attention $stock --loss cross-entropy"
ours="--precision bf16-master --optimizer fused --attention triton --loss fused"

if chosen plans; then
  if [ $device = cuda ]; then
    clocks=index,timestamp,clocks.sm,power.draw,clocks_event_reasons.active
    nvidia-smi --query-gpu=$clocks --format=csv --loop-ms=100 >"$out/clocks.csv" 2>&1 & watcher=$!
  fi
  timed 150 python3 "$(dirname "$0")/recompute_plans.py" "$out" --trace $trial 2>&1 |
    tee "$out/plans.txt"
  [ "${watcher:-}" ] && kill $watcher
fi
if chosen long; then
  rows 130 layout $long $few --layout "dp2 zero3" --precision bf16 --compile blocks --attention triton --loss fused \
    --checkpointing feed-forward
fi
if chosen long-torch; then
  rows 130 layout $long $few --layout "dp2 torch-fsdp" --precision bf16 --compile blocks --attention "$stock" \
    --loss fused --checkpointing blocks
fi
if chosen short; then
  rows 70 step $short $times $ours --compile blocks
  rows 70 step $short $times $torchs --compile blocks
  rows 70 step $short $times $ours --compile on
fi
if chosen xl; then
  rows 70 step $xl $times $ours --compile blocks
  rows 70 step $xl $times $torchs --compile blocks
fi
if chosen wide; then
  rows 70 step $wide $times $ours --compile blocks
  rows 70 step $narrow $times $ours --compile blocks
  rows 70 step $wide $times $torchs --compile blocks
fi
echo "done at $SECONDS s"
exit 0
