"""Records the dtypes of a step's tensors (DtypesSpec), and the rounding errors of sums in different
dtypes (AccumulationSpec).
"""

import torch

from stepgauge.bench.build import build, check
from stepgauge.measure.dtypes import TensorType, accumulation, dtype_of, probe
from stepgauge.measure.environment import environment
from stepgauge.spec.dtypes import AccumulationSpec, DtypesSpec
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel


def run(spec: DtypesSpec) -> Record:
    """Returns a record with the table "dtypes": a row for every parameter, module output, loss and
    gradient, and for the logits.
    """
    check(spec)
    rows = [[tensor.what, tensor.path, tensor.module, tensor.dtype] for tensor in _probed(spec)]
    return Record.of(
        spec,
        tables={"dtypes": [["what", "where", "module", "type"], *rows]},
        environment=environment(torch.device(spec.device)),
    )


def _probed(spec: DtypesSpec) -> list[TensorType]:
    device = torch.device(spec.device)
    step, batch = build(spec, device)
    with step.precision.matmul_mode():
        tensors = probe(step.module, lambda: step.forward(*batch), step.backward)
        if isinstance(spec.model, UserModel):
            return tensors
        # With targets, the loss takes the head's weight and no module returns logits. Without
        # targets, the model returns them.
        with torch.no_grad(), step.precision.autocasting(device):
            logits = step.module(batch[0])
    loss = [tensor.what for tensor in tensors].index("loss")
    return [*tensors[:loss], dtype_of("logits", "head", logits, "Linear"), *tensors[loss:]]


def run_accumulation(spec: AccumulationSpec) -> Record:
    """Returns a record with the table "sums": the sum of a thousand times 0.01, by the dtypes of
    terms and sum.
    """
    device = torch.device(spec.device)
    return Record.of(
        spec,
        tables={
            "sums": [
                ["1000 × 0.01", "sum"],
                *([name, total] for name, total in accumulation(device).items()),
            ]
        },
        environment=environment(device),
    )
