"""The gaps before kernels.

Short operations were timed in CUDA graphs that repeat one operation. In a step, whether launched or replayed,
a kernel starts 1 to 1.6 µs later after the one before it than there (calibrate/launch_gap.py).
"""

import functools

from stepgauge.spec.calibration import OperationTable

# Kernels of one call, counted in traces (docs/log/2026-11-30-launch-gaps.md); 1 for all others. A product
# launches one or two, and takes no longer than in a graph.
KERNELS = {
    "heads forward": 4,
    "heads backward": 7,
    "gate forward": 2,
    "gate backward": 4,
    "rmsnorm backward": 2,
    "layernorm backward": 2,
    "attention sdpa backward": 3,
    "cross-entropy": 2,
    "matmul": 0,
    "optimizer": 0,  # few and long
}


@functools.cache
def kernels_of(operation: str) -> int:
    """Returns the number of kernels of an operation that have a gap before them."""
    return next((count for name, count in KERNELS.items() if operation.startswith(name)), 1)


def gap_us(table: OperationTable | None) -> float:
    """Returns the microseconds before each kernel; 0 if the hardware file has no LAUNCH_GAP."""
    return float(table.rows[0][-1]) if table else 0.0
