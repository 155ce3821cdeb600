#!/usr/bin/env bash
# Tests and measures attention in Gluon on one Hopper GPU:
#   benchmarks/kernels/gluon_campaign.sh OUT
# PARTS="backward forward" selects parts; both by default, in this order. Each takes under 300 s.
#   backward  tests its results, also under torch.compile and in CUDA graphs, then measures the anchors next to all peers
#   forward   the same; before the anchors also compares it with the portable forward at shapes that do not fill the GPU
# Writes OUT/PART/tests.txt, the files of kernels_campaign.sh in OUT/PART, and OUT/forward/forward_by_tiles.{jsonl,txt}.
set -uo pipefail
known="backward forward"
cd "$(dirname "$0")/../.."
. benchmarks/parts.sh
root=$(mkdir -p "$1" && cd "$1" && pwd)
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}

tests() {  # SECONDS OPTIONS...
  local limit=$1; shift
  timeout -k 5 "$limit" python3 -m pytest -m gpu -q -p no:cacheprovider "$@" 2>&1 | tee -a "$out/tests.txt" | tail -n 15
}
in_use() { tests 100 tests/kernels/test_attention.py \
  -k "compile_and_second_launch or in_cuda_graphs or no_synchronisation or beyond_int32"; }
anchors() { PARTS=attention BUDGET=${ANCHORS_BUDGET:-90} WARM=15 benchmarks/kernels_campaign.sh "$out"; }

for part in $parts; do
  out=$root/$part && mkdir -p "$out"
  if [ "$part" = backward ]; then
    tests 100 tests/kernels/test_attention_gluon_backward.py
    in_use
    anchors
  else
    tests 80 tests/kernels/test_attention_gluon.py
    in_use
    timeout -k 5 70 python3 benchmarks/kernels/forward_by_tiles.py "$out" --budget "${TILES_BUDGET:-50}" 2>&1 \
      | tee "$out/forward_by_tiles.txt" | tail -n 130
    anchors
  fi
  echo "$part done at $SECONDS s"
done
