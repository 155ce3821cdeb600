#!/usr/bin/env bash
# Repeats the main checks on one GPU after a change, most important first:
#   benchmarks/one_gpu_campaign.sh OUT
# PARTS="tests kernels" selects parts. BUDGET=... is their limit in seconds (540 by default). TRIAL=1 runs everything
# on small shapes of a CPU.
#   tests      tests that need one GPU
#   kernels    our kernels at anchor shapes, next to the peers that can be imported
#   predict    calibrates, then predicts and measures steps that the calibration has not seen
#   memory     predicts and measures peaks of other libraries' models (needs transformers and torchvision)
# Writes OUT/{tests.txt,memory_of_models.jsonl,log.txt}, OUT/kernels/ and OUT/predict/.
set -uo pipefail
known="tests kernels predict memory"
. "$(dirname "$0")/parts.sh"
out=$(mkdir -p "$1" && cd "$1" && pwd)

logged() { "$@" 2>&1 | tee -a "$out/log.txt"; }

if chosen tests; then
  logged timed 330 python3 -m pytest -m gpu -q -n 4 -p no:cacheprovider tests/kernels tests/measure tests/bench
  cp "$out/log.txt" "$out/tests.txt"
fi
if chosen kernels; then
  logged timed 380 python3 benchmarks/kernels/anchors.py "$out/kernels" ${TRIAL:+--trial}
fi
if chosen predict; then
  logged timed 420 python3 benchmarks/validation_campaign.py "$out/predict" ${TRIAL:+--trial}
fi
if chosen memory; then
  logged timed 240 python3 benchmarks/memory_of_models.py "$out" ${TRIAL:+--trial}
fi
echo "done at $SECONDS s"
exit 0
