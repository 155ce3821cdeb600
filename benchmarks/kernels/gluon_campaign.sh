#!/usr/bin/env bash
# Attention's forward in Gluon on one Hopper GPU: benchmarks/kernels/gluon_campaign.sh OUT
# First that it is right, alone and from C++, under torch.compile and without synchronisation; then it beside the
# portable forward where it fills little of the chip, and the anchors beside all peers. Under 300 s; each part has a
# limit of its own. Writes OUT/tests.txt, OUT/forward_by_tiles.{jsonl,txt} and what kernels_campaign.sh writes.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
tests() {  # SECONDS OPTIONS...
  local limit=$1; shift
  timeout -k 5 "$limit" python3 -m pytest -m gpu -q -p no:cacheprovider "$@" 2>&1 | tee -a "$out/tests.txt" | tail -n 15
}
tests 80 tests/kernels/test_attention_gluon.py
tests 100 tests/kernels/test_attention.py \
  -k "cpp_equals_python or compile_and_second_launch or no_synchronisation or beyond_int32"
echo "tests done at $SECONDS s"
timeout -k 5 70 python3 benchmarks/kernels/forward_by_tiles.py "$out" --budget "${TILES_BUDGET:-50}" 2>&1 \
  | tee "$out/forward_by_tiles.txt" | tail -n 130
echo "tiles done at $SECONDS s"
PARTS=attention BUDGET=${ANCHORS_BUDGET:-90} WARM=15 benchmarks/kernels_campaign.sh "$out"
echo "all done at $SECONDS s"
