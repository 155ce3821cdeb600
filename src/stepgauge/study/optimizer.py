"""AdamW in one launch over all parameters beside torch's."""

from stepgauge.spec.grids import ADAMW_ANCHORS
from stepgauge.study.kernels import kernel_experiment

EXPERIMENT = kernel_experiment(
    "adamw",
    ADAMW_ANCHORS,
    name="optimizer",
    title="Optimizer step",
    question="How near does AdamW come to reading and writing its parameters, gradients and state once?",
    method=(
        "Gated Transformer blocks of nine tensors each, four widths to their feed-forward. 20 steps of each "
        "implementation are checked against float64, then steps are timed in turns in one process. Bytes a parameter: "
        "28 in fp32; in bf16 22 for ours, which keeps its state in fp32, and 14 for torch's, which keeps it in bf16. "
        "The ceiling is a copy in the same process."
    ),
)
