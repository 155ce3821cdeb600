"""Compares our kernels with their peers: one file per operation. `comparison` runs them, and
spec/grids.py has the named shapes.

A new operation needs a spec in spec/kernel.py, a file with an OPERATION here, and a line in
OPERATIONS.
"""

from collections.abc import Mapping

from stepgauge.bench.kernels import adamw, attention, linear_cross_entropy, rms_norm
from stepgauge.bench.kernels.operation import Operation

OPERATIONS: Mapping[str, Operation] = {
    operation.spec.kind: operation
    for operation in (
        rms_norm.OPERATION,
        attention.OPERATION,
        linear_cross_entropy.OPERATION,
        adamw.OPERATION,
    )
}
