"""Runs a CalibrationSpec, which times one operation, and adds its record to a hardware file.

Shapes follow one another without a pause, so that a GPU has the clock and power of a training step and
not those of a short burst. The record has both for each shape. Ranks that share a CPU all time the same
shape at the same time.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.bench.ranks import OnRanks
from stepgauge.bench.sweep import Job
from stepgauge.calibrate import host, launch_gap, wrappers
from stepgauge.calibrate.grids import grid_of
from stepgauge.calibrate.operations import TRACED_CALLS, TimedOperation, operations, other_work
from stepgauge.calibrate.timing import METRICS, Timing, clock_and_power, time_of, warm_up_ms_for
from stepgauge.measure import cpu_contention, devices
from stepgauge.measure.cpu_contention import Span, missed_metric, span_since
from stepgauge.measure.environment import environment
from stepgauge.runtime.world import gathered_objects, this_world
from stepgauge.spec.calibration import (
    EXACT,
    LAUNCH_GAP,
    OPERATORS,
    CalibrationSpec,
    OperationTable,
)
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.fallbacks import libraries_of
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record, Sample

Row = tuple[Any, ...]


def names(device: torch.device) -> list[str]:
    """Returns the operations of the device. On a CPU, the host launches nothing and is not timed."""
    known = list(operations(grid_of(device.type)))
    if device.type == "cpu":
        return known
    gap = [LAUNCH_GAP] if device.type == "cuda" else []
    return [*known, *gap, *host.names()]


def job(spec: CalibrationSpec) -> Job:
    """Returns the job of one operation, on one device or on several ranks at the same time.

    Raises ValueError for an unknown operation.
    """
    known = names(torch.device(spec.device))
    known += [OPERATORS, *(wrappers.names() if spec.ranks > 1 else [])]
    if spec.operation not in known and not host.measures(spec.operation):
        raise ValueError(f"operation is {spec.operation!r}; choose one of {known}")
    return Job(ON_RANKS if spec.ranks > 1 else run, spec, process="calibration")


@dataclasses.dataclass
class Timed:
    """The measurement of one operation on one rank.

    rows          sizes and microseconds
    readings      clock and power after each shape
    left_out      number of shapes that did not fit in memory or in the time limit
    out_of_time   those of them that the time limit left out
    at_host_pace  number of short shapes whose time may be that of their launches
    span          readings of the CPU's load before and after
    """

    axes: tuple[str, ...]
    rows: list[Row]
    readings: list[dict[str, float]]
    left_out: int
    out_of_time: int = 0
    at_host_pace: int = 0
    span: Span | None = None


def run(spec: CalibrationSpec) -> Record:
    device = torch.device(spec.device)
    return _record(spec, [_measured(spec, device)], device)


def _measured(spec: CalibrationSpec, device: torch.device) -> Timed:
    before = cpu_contention.reading()
    if host.measures(spec.operation):
        timed = _timed(host.measure(spec, device), device)
    elif spec.operation in wrappers.names():
        timed = _timed(wrappers.measure(spec, device), device)
    elif spec.operation == LAUNCH_GAP:
        timed = _timed(launch_gap.measure(device), device)
    else:
        timed = _times(spec, device)
    return dataclasses.replace(timed, span=span_since(before))


def _timed(table: OperationTable, device: torch.device) -> Timed:
    """Returns the table as a measurement, with one reading of clock and power for all rows."""
    return Timed(table.axes, list(table.rows), [clock_and_power(device)] * len(table.rows), 0)


def _on_rank(spec: CalibrationSpec) -> Timed:
    return _measured(spec, this_world().device(spec.device))


def _of_ranks(spec: CalibrationSpec, ranks: list[Timed]) -> Record:
    return _record(spec, ranks, torch.device(spec.device))


ON_RANKS = OnRanks(_on_rank, _of_ranks)


def _record(spec: CalibrationSpec, ranks: Sequence[Timed], device: torch.device) -> Record:
    """Returns the record: the mean over ranks if they share a CPU, or the slowest GPU's times.

    A step waits for its slowest GPU.
    """
    slowest = max(ranks, key=lambda timed: sum(row[-1] for row in timed.rows))
    rows = slowest.rows
    if device.type == "cpu":
        rows = []
        for index, (*sizes, _) in enumerate(slowest.rows):
            mean_us = statistics.fmean(timed.rows[index][-1] for timed in ranks)
            rows.append((*sizes, mean_us))
    units = list(slowest.readings[0]) if slowest.readings else []
    clocks = {unit: [values[unit] for values in slowest.readings] for unit in units}
    times: list[list[Any]] = [[*slowest.axes, "us", *units]]
    for row, values in zip(rows, slowest.readings, strict=True):
        times.append([*row, *values.values()])
    return Record.of(
        spec,
        metrics={
            "shapes": Sample.exact(len(rows), ""),
            "shapes_left_out": Sample.exact(slowest.left_out, ""),
            "shapes_out_of_time": Sample.exact(slowest.out_of_time, ""),
            "shapes_at_host_pace": Sample.exact(slowest.at_host_pace, ""),
            **{METRICS[unit]: Sample.of(values, unit) for unit, values in clocks.items()},
            # the host of a GPU needs one core per rank
            **missed_metric(
                (timed.span for timed in ranks),
                torch.get_num_threads() if device.type == "cpu" else 1,
            ),
        },
        tables={"times": times},
        environment=environment(device),
    )


def _times(spec: CalibrationSpec, device: torch.device) -> Timed:
    """Times the operation on this process's device, shape by shape together with the other ranks."""
    grid = grid_of(device.type)
    are_calls = spec.operation == OPERATORS
    operation = TRACED_CALLS if are_calls else operations(grid)[spec.operation]
    matmul = "high" if spec.operation.endswith("tf32") else "highest"
    torch.set_float32_matmul_precision(matmul)
    timed = Timed(operation.axes, [], [], 0)
    deadline = time.perf_counter() + spec.seconds
    shapes = list(spec.shapes or operation.grid)
    warm_up_ms = warm_up_ms_for(len(shapes), device)
    for sizes in shapes:
        in_time = _all_agree(time.perf_counter() < deadline)
        timing = _time_of(operation, sizes, device, spec, warm_up_ms) if in_time else None
        if not _all_agree(timing is not None) or timing is None:
            timed.left_out += 1
            timed.out_of_time += not in_time
            continue
        timed.at_host_pace += timing.at_host_pace
        timed.rows.append((*sizes, timing.us))
        timed.readings.append(clock_and_power(device))
        if device.type == "cuda" and len(timed.rows) % 16 == 0:
            torch.cuda.empty_cache()
    return timed


def _all_agree(here: bool) -> bool:
    """Returns True if it is true on every rank, so that all go on to the next shape together."""
    if not dist.is_initialized():
        return here
    return all(gathered_objects(here))


def _time_of(
    operation: TimedOperation, sizes: tuple[Any, ...], device: torch.device, spec: CalibrationSpec,
    warm_up_ms: float,
) -> Timing | None:  # fmt: skip
    """Times one shape. Returns None if it does not fit in memory, or if a traced call cannot be
    repeated outside of its network.
    """
    try:
        make = functools.partial(operation.make, *sizes, device)
        name = operation.alternates_with
        other = other_work(name, device) if name else None
        return time_of(make, device, spec.milliseconds, other, warm_up_ms=warm_up_ms)
    except torch.AcceleratorError:
        raise  # the device's context is lost, and later times would be wrong
    except Exception as error:
        too_large = devices.out_of_memory_reason(error) is not None and spec.ranks == 1
        if not too_large and operation is not TRACED_CALLS:
            raise
        return None


def with_operations(hardware: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """Returns the file with tables replaced by those of the records."""
    single = dict(hardware.operations)
    by_ranks = {ranks: dict(tables) for ranks, tables in hardware.by_ranks.items()}
    for record in records:
        ranks = record.spec["ranks"]
        operation = record.spec["operation"]
        tables = by_ranks.setdefault(ranks, {}) if ranks > 1 else single
        # shapes of certain steps have their own table; older records have no field `sizes`
        name = f"{operation} {EXACT}" if record.spec.get("sizes") else operation
        tables[name] = table_of(record)
    return dataclasses.replace(hardware, operations=single, by_ranks=by_ranks)


def table_of(record: Record) -> OperationTable:
    """Returns the record's sizes and microseconds, without clock and power."""
    head, *rows = record.tables["times"]
    end = head.index("us")
    is_on_gpu = record.spec["device"] != "cpu" and not record.spec["operation"].startswith("host")
    return OperationTable(
        axes=tuple(head[:end]),
        rows=tuple(tuple(row[: end + 1]) for row in rows),
        captured=is_on_gpu and record.median("shapes_at_host_pace") == 0,
        disturbed=is_disturbed(record),
        left_out=int(record.median("shapes_left_out") or 0),
        libraries=libraries_of(record),
    )
