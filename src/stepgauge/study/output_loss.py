"""Output layer and cross-entropy in one operation that never holds the logits, beside those that
do.
"""

from stepgauge.spec.grids import LINEAR_CROSS_ENTROPY_ANCHORS
from stepgauge.study.kernels import kernel_experiment

EXPERIMENT = kernel_experiment(
    "linear-cross-entropy",
    LINEAR_CROSS_ENTROPY_ANCHORS,
    name="output-loss",
    title="Output layer and loss",
    question="What does it cost in time, and save in memory, never to hold the logits?",
    method=(
        "Loss and both gradients, each implementation checked against float64 first, then timed in turns in one "
        "process. FLOPs: 6 N D V, three products of N tokens, width D and V words. Extra memory, on a GPU, is the peak "
        "beyond inputs and results: logits of 16,384 tokens and 128,256 words are 3.9 GiB in bf16."
    ),
)
