#!/usr/bin/env bash
# Measures layouts on two or four GPUs of one host:
#   benchmarks/layout_campaign.sh OUT
# PARTS="context tensor" selects parts; all by default, most important first. BUDGET=... is their limit in seconds (540
# by default). TRIAL=1 runs everything on small shapes of a CPU. The parts that need four GPUs, in ten minutes:
#   BUDGET=590 PARTS="pairs tensor sharded llama context" benchmarks/layout_campaign.sh OUT
# Parts:
#   context      one long sequence: on one GPU, and split over all GPUs
#   tensor       tensor parallel next to torch's, plain and asynchronous, with each GPU's clock
#   beside       how long kernels take while NCCL runs and while it does not, from a trace of a sequence split over two
#   pairs        two axes at once; needs four GPUs
#   sharded      ZeRO 3 next to torch's fully_shard
#   pipeline     schedules next to torch's, each after its simulated step and peaks, eager and compiled
#   bert         BERT-base in few and many micro-batches: with CUDA graphs, eager, and torch's schedule
#   llama        an 8 B network under every layout that may fit
#   connections  overlapped tensor parallel with a hardware queue for each stream
#   calibrate    writes a hardware file, for `stepgauge validate` of the rows
#   tests        the GPU tests of tests/parallel
# Writes OUT/{records.jsonl,rows.txt,log.txt,tensor_parallel.jsonl,connections/,hardware.json,tests.txt,report.html}.
set -uo pipefail
known="context tensor beside pairs sharded pipeline bert llama connections calibrate tests"
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
device=cuda small=() trial=()
[ "${TRIAL:-}" ] && device=cpu small=(--small) trial=(--trial)

rows() {  # SECONDS PART
  chosen "$2" || return 0
  timed $(($1 + 20)) python3 benchmarks/layout_rows.py "$work/rows" --parts "$2" --seconds "$1" "${small[@]}" \
    > >(tee -a "$out/rows.txt") 2>>"$out/log.txt"
  cp "$work/rows/"{records.jsonl,failures.log} "$out/" 2>/dev/null
}

tensor() {  # SECONDS FOLDER OPTIONS...
  local limit=$1 folder=$2; shift 2
  mkdir -p "$folder"
  OUT="$folder" timed "$limit" python3 benchmarks/tensor_parallel_campaign.py "${small[@]}" "$@" \
    > >(tee -a "$out/rows.txt") 2>>"$out/log.txt"
}

rows 110 context
if chosen tensor; then tensor 150 "$out" --attention triton --only "one GPU" overlapped torch "torch async" plain; fi
if chosen beside; then
  timed 90 python3 benchmarks/kernels_beside_collectives.py "$out" --part context --layouts "cp2 ulysses zero2" \
    "${trial[@]}" >>"$out/rows.txt" 2>>"$out/log.txt"
fi
rows 150 pairs
rows 90 sharded
rows 240 pipeline
rows 60 bert
rows 240 llama
if chosen connections; then
  CUDA_DEVICE_MAX_CONNECTIONS=32 tensor 60 "$out/connections" --only "one GPU" overlapped
fi
if chosen calibrate; then
  timed 240 python3 -m stepgauge calibrate "$out/hardware.json" --device "$device" --ranks 2 --out "$work/calibration" \
    >>"$out/rows.txt" 2>>"$out/log.txt"
fi
if chosen tests; then timed 200 python3 -m pytest -m gpu -q -p no:cacheprovider tests/parallel 2>&1 | tee "$out/tests.txt"; fi
[ -e "$work/rows/records.jsonl" ] && timeout 60 python3 -m stepgauge report "$work/rows" >/dev/null \
  && cp "$work/rows/report.html" "$out/"
echo "done at $SECONDS s"
exit 0
