"""Every layout of a training run, from formulas or, of a network without any, from its traced
operators.
"""

from collections.abc import Callable, Sequence

from stepgauge.cost.planning.planner import Plan, plan
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.traceable import has_formulas
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.cost.traced.plan import plan_traced
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import traced_on


def planned(
    spec: PlanSpec,
    file: HardwareFile,
    *,
    top: int = 10,
    tracing: Callable[[LayoutSpec], None] = lambda asked: None,
) -> Plan:
    """The best layouts on that machine. `tracing` is told each step that is traced, for which torch is
    imported. Raises ValueError for the device of another kind of machine, and as plan and
    plan_traced do.
    """

    def trace(asked: LayoutSpec) -> Sequence[TracedNetwork]:
        tracing(asked)
        return traced_on(asked, file)

    file.require_kind(spec.device)
    machine = CalibratedMachine(file.on_ranks(spec.gpus))
    if isinstance(spec.model, UserModel):
        return plan_traced(spec, trace, machine)
    return plan(spec, machine, top=top, trace=None if has_formulas(spec) else trace)
