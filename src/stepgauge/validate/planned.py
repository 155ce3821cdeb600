"""Every layout of a training run, from formulas or, of a user's network, from its traced operators."""

from stepgauge.cost.planning.planner import Plan, plan
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.plan import plan_traced
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import traced_on


def planned(spec: PlanSpec, file: HardwareFile, *, top: int = 10) -> Plan:
    """The best layouts on that machine; a user's network imports torch. Raises ValueError for the
    device of another kind of machine, and as plan and plan_traced do.
    """
    file.require_kind(spec.device)
    machine = CalibratedMachine(file.on_ranks(spec.gpus))
    if not isinstance(spec.model, UserModel):
        return plan(spec, machine, top=top)
    return plan_traced(spec, lambda asked: traced_on(asked, file), machine)
