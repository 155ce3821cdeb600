"""A DtypesSpec or an AccumulationSpec run: which types a step has, and what sums in a type lose, as
records.
"""

import torch

from stepgauge.bench.build import build, check
from stepgauge.measure.dtypes import Found, accumulation, dtype_of, probe
from stepgauge.measure.environment import environment
from stepgauge.spec.dtypes import AccumulationSpec, DtypesSpec
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel


def run(spec: DtypesSpec) -> Record:
    """Table "dtypes": [what, where, module, type] of every parameter, module output, logit, loss
    and gradient.
    """
    check(spec)
    rows = [[found.what, found.path, found.module, found.dtype] for found in _probed(spec)]
    return Record.of(
        spec,
        tables={"dtypes": [["what", "where", "module", "type"], *rows]},
        environment=environment(torch.device(spec.device)),
    )


def _probed(spec: DtypesSpec) -> list[Found]:
    device = torch.device(spec.device)
    step, batch = build(spec, device)
    with step.precision.matmul_mode():
        found = probe(step.module, lambda: step.forward(*batch), step.backward)
        if isinstance(spec.model, UserModel):
            return found
        # The loss takes the head's weight; its logits are a module's output only without targets.
        with torch.no_grad(), step.precision.autocasting(device):
            logits = step.module(batch[0])
    here = [f.what for f in found].index("loss")
    return [*found[:here], dtype_of("logits", "head", logits, "Linear"), *found[here:]]


def run_accumulation(spec: AccumulationSpec) -> Record:
    """Table "sums": what a thousand times 0.01 add up to, by the types of terms and sum."""
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
