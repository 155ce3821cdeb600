"""Memory that a step surely needs on a CPU, by closed formula.

The peak of cost/memory/peak.py is that of a GPU, whose kernels keep other copies of logits. This is
a lower bound, by which a step can be refused: what is held at once when backward starts, in the loss
or in the last block.
"""

from stepgauge.cost.memory.activations import end_parts, kept
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.spec.step import WorkSpec

LOGITS = "log-softmax"
# The eager loss's backward holds its input, which forward kept, and two gradients of that size.
EAGER_LOGITS = 3


def least_held(spec: WorkSpec) -> float:
    """Returns bytes of activations and logits that exist at once in a step on a CPU, at the least.

    Raises ValueError for a network without formulas.
    """
    operations = StepOperations(spec)
    logits = end_parts(operations).get(LOGITS, 0.0)
    if spec.phases == "forward":  # without gradients: nothing else is kept
        return logits
    num_logits = 1 if operations.compiles_ends else EAGER_LOGITS
    keeps = kept(operations)
    return keeps.blocks + max(num_logits * logits, keeps.recomputed)
