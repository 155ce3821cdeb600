"""Ranks the layouts of a training run, by formulas or, for a network without any, by traces."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from stepgauge.cost.planning.merged import merged
from stepgauge.cost.planning.planner import Hear, Plan, plan
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.cost.traced.plan import plan_traced
from stepgauge.cost.traced.traceable import has_formulas
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import traced_on, uncut_on


def planned(
    spec: PlanSpec,
    file: HardwareFile,
    *,
    top: int = 10,
    tracing: Callable[[LayoutSpec], None] = lambda spec: None,
    hear: Hear = lambda doing, done, total: None,
) -> Plan:
    """Returns the best layouts on the machine of the hardware file.

    Calls `tracing` before each step that is traced, which imports torch, and `hear` with the progress
    of all others. Raises ValueError if the file is of another kind of device, and for the reasons of
    plan and plan_traced.
    """

    def trace(step: LayoutSpec) -> Sequence[TracedNetwork]:
        tracing(step)
        return traced_on(step, file)

    file.require_kind(spec.device)
    machine = CalibratedMachine(file.on_ranks(spec.gpus))
    if isinstance(spec.model, UserModel):
        return plan_traced(spec, trace, machine, uncut=uncut_on(spec.model, file, spec.device))
    return plan(spec, machine, top=top, trace=None if has_formulas(spec) else trace, hear=hear)


def planned_by_compile(specs: Sequence[PlanSpec], file: HardwareFile, **options: Any) -> Plan:
    """Returns one ranking of specs that differ only in `compile`; `options` are those of `planned`.

    A mode that no layout supports is left out, with the reason. Raises ValueError with the first such
    reason if that leaves nothing.
    """
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for spec in specs:
        try:
            plans[spec.compile] = planned(spec, file, **options)
        except ValueError as error:
            refused[f"compile {spec.compile}"] = str(error)
    if not plans:
        raise ValueError(next(iter(refused.values())))
    if len(specs) == 1:
        return plans[specs[0].compile]
    plan = merged(plans, noun="compile")
    return dataclasses.replace(plan, refused={**plan.refused, **refused})
