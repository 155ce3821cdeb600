"""Plans for a user's own network: each layout is traced as one rank runs it, simulated and ranked."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.planning.planner import Plan, device_bytes, limit_of
from stepgauge.cost.rates.estimate import with_spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_choices import MICRO_BATCHES_PER_RANK, layouts_on
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model_fields import divisors
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB

Trace = Callable[[LayoutSpec], Sequence[TracedNetwork]]


class UntraceableError(Exception):
    """The whole network cannot be traced, so that no layout can be predicted."""


def plan_traced(
    spec: PlanSpec, trace: Trace, machine: CalibratedMachine, *, uncut: Mapping[str, str]
) -> Plan:
    """Ranks every layout that can be traced, with data, tensor and pipeline axes.

    uncut  by axis: why the network cannot be cut along it, so that no such layout is traced

    Raises ValueError if no layout can be predicted or none fits.
    """
    limit = limit_of(spec, machine)
    refused: dict[str, str] = {}  # by axis
    rows: list[Record] = []
    for tensor, pipeline in _degrees(spec.gpus, machine.network.gpus_per_node):
        axes = [name for name, ranks in (("tensor", tensor), ("pipeline", pipeline)) if ranks > 1]
        refused |= {axis: uncut[axis] for axis in axes if axis in uncut}
        if any(axis in refused for axis in axes):  # also refused at a smaller degree
            continue
        try:
            rows += _rows_of_degrees(spec, tensor, pipeline, trace, machine)
        except UntraceableError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            refused.setdefault(" and ".join(axes) or "data", str(error))
    if not rows:
        raise ValueError(next(iter(refused.values())))
    fitting = [row for row in rows if device_bytes(row) <= limit]
    if not fitting:
        least = min(map(device_bytes, rows)) / GIB
        raise ValueError(
            f"nothing fits: every layout needs at least {least:.1f} GiB per GPU, which has "
            f"{limit / GIB:.1f}; give the model a smaller batch"
        )
    fitting.sort(key=lambda row: row.metrics["step_ms"].median)
    return Plan(fitting, {}, (len(rows), len(fitting)), limit, refused)


def _degrees(gpus: int, gpus_per_node: int) -> list[tuple[int, int]]:
    """Pairs of tensor and pipeline ranks: single axes first, small degrees first."""
    pairs = [
        (tensor, pipeline)
        for tensor in divisors(gpus)
        if tensor <= gpus_per_node
        for pipeline in divisors(gpus // tensor)
    ]
    return sorted(pairs, key=lambda pair: (min(pair) > 1, max(pair), pair))


def _rows_of_degrees(
    spec: PlanSpec, tensor: int, pipeline: int, trace: Trace, machine: CalibratedMachine
) -> list[Record]:
    """The predictions of every wrapper and schedule with these axes.

    Raises ValueError with the first reason if none can be predicted, which is that of the smallest
    number of micro-batches, and UntraceableError.
    """
    data = spec.gpus // tensor // pipeline
    if spec.global_batch % data:
        raise ValueError(
            f"global_batch is {spec.global_batch}; {data} data ranks cannot share so many batches of "
            f"the model: choose a multiple"
        )
    rows: list[Record] = []
    reasons: set[str] = set()
    first = reason = ""
    for alternatives in _layouts(data, tensor, pipeline):
        for layout in alternatives:
            try:
                rows.append(_predicted(layout, spec, trace, machine))
                break
            except ValueError as error:
                reason = str(error)
                if reason in reasons:  # the number of micro-batches is not the cause
                    break
                reasons.add(reason)
        first = first or reason
    if not rows:
        raise ValueError(first)
    return rows


def _layouts(data: int, tensor: int, pipeline: int) -> Iterator[list[Layout]]:
    """Layouts with these axes. Those in one list differ only in micro-batches, the best first."""
    for layout in layouts_on(data=data, tensor=tensor, pipeline=pipeline):
        counts = MICRO_BATCHES_PER_RANK if pipeline > 1 else (1,)
        yield [dataclasses.replace(layout, microbatches=pipeline * count) for count in counts]


def _predicted(layout: Layout, spec: PlanSpec, trace: Trace, machine: CalibratedMachine) -> Record:
    step = LayoutSpec(
        model=spec.model, layout=str(layout), accumulation=spec.global_batch // layout.data,
        precision=spec.precision, compile=spec.compile, optimizer=spec.optimizer,
        device=spec.device,
    )  # fmt: skip
    try:
        networks = trace(step)
    except ValueError as error:
        is_whole = layout.tensor == layout.pipeline == 1 and not layout.gathers_weights
        raise (UntraceableError(str(error)) if is_whole else error) from None
    return with_spread(predict_layout(step, machine, networks))
