"""Each operation beside its peers: one file an operation, `comparison` runs them, spec/grids.py has
the shapes by name.

A new operation is a spec in spec/kernel.py, one file with an OPERATION here, and one line in
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
