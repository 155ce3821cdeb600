"""Layouts of a network that is known by its traced operators alone: data axes, ranked."""

import dataclasses
from collections.abc import Callable

from stepgauge.cost.planning.planner import Plan, device_bytes, limit_of
from stepgauge.cost.rates.estimate import spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.cost.traced.step import predict_traced
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record, Sample

PLANNED = ("bucketed", "zero1", "zero2", "zero3")


def plan_traced(
    spec: PlanSpec, trace: Callable[[LayoutSpec], TracedNetwork], machine: CalibratedMachine
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
    wrappers = [w for w in PLANNED if spec.compile == "off" or not WRAPPERS[w].shards("weights")]
    if spec.gpus == 1:
        wrappers = ["none"]
    rows = [_simulated(wrapper, spec, trace, machine) for wrapper in wrappers]
    fitting = [row for row in rows if device_bytes(row) <= limit]
    if not fitting:
        least = min(map(device_bytes, rows)) / 2**30
        raise ValueError(
            f"nothing fits: the least that a layout needs is {least:.1f} GiB a GPU, of "
            f"{limit / 2**30:.1f}; give the model a smaller batch"
        )
    fitting.sort(key=lambda row: row.metrics["step_ms"].median)
    return Plan(fitting, {}, (len(rows), len(fitting)), limit)


def _simulated(
    wrapper: str,
    spec: PlanSpec,
    trace: Callable[[LayoutSpec], TracedNetwork],
    machine: CalibratedMachine,
) -> Record:
    asked = LayoutSpec(
        model=spec.model, layout=str(Layout(data=spec.gpus, wrapper=wrapper)),
        accumulation=spec.global_batch // spec.gpus, precision=spec.precision,
        compile=spec.compile, optimizer=spec.optimizer, device=spec.device,
    )  # fmt: skip
    record = predict_traced(asked, trace(asked), machine)
    off = Sample.exact(spread(record), "fraction of the step")
    return dataclasses.replace(record, metrics={**record.metrics, "spread": off})
