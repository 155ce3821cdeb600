"""Layouts of a network that is known by its traced operators alone: data axes, ranked."""

import dataclasses
from collections.abc import Callable, Sequence

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.planning.planner import Plan, device_bytes, limit_of
from stepgauge.cost.rates.estimate import spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.units import GIB

PLANNED = ("bucketed", "zero1", "zero2", "zero3")


def plan_traced(
    spec: PlanSpec,
    trace: Callable[[LayoutSpec], Sequence[TracedNetwork]],
    machine: CalibratedMachine,
) -> Plan:
    """Every layout, all of them traced and simulated. Raises ValueError for batches that the ranks cannot
    share, and where nothing fits.
    """
    if spec.global_batch % spec.gpus:
        raise ValueError(
            f"global_batch is {spec.global_batch}; {spec.gpus} GPUs cannot share so many batches of "
            f"the model: choose a multiple"
        )
    limit = limit_of(spec, machine)
    wrappers = PLANNED if spec.gpus > 1 else ("none",)
    rows = [_simulated(wrapper, spec, trace, machine) for wrapper in wrappers]
    fitting = [row for row in rows if device_bytes(row) <= limit]
    if not fitting:
        least = min(map(device_bytes, rows)) / GIB
        raise ValueError(
            f"nothing fits: the least that a layout needs is {least:.1f} GiB a GPU, of "
            f"{limit / GIB:.1f}; give the model a smaller batch"
        )
    fitting.sort(key=lambda row: row.metrics["step_ms"].median)
    return Plan(fitting, {}, (len(rows), len(fitting)), limit)


def _simulated(
    wrapper: str,
    spec: PlanSpec,
    trace: Callable[[LayoutSpec], Sequence[TracedNetwork]],
    machine: CalibratedMachine,
) -> Record:
    asked = LayoutSpec(
        model=spec.model, layout=str(Layout(data=spec.gpus, wrapper=wrapper)),
        accumulation=spec.global_batch // spec.gpus, precision=spec.precision,
        compile=spec.compile, optimizer=spec.optimizer, device=spec.device,
    )  # fmt: skip
    record = predict_layout(asked, machine, trace(asked))
    off = Sample.exact(spread(record), "fraction of the step")
    return dataclasses.replace(record, metrics={**record.metrics, "spread": off})
