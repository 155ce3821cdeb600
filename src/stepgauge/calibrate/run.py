"""A CalibrationSpec run: `job` gives the job of one operation, and its record joins a hardware file.

Shapes follow one another without a pause, so that a GPU runs at the clock and power that it holds
in a training step, and not at those of a short burst; both stand beside each shape in the record.
Where several ranks share a CPU, all of them time the same shape at once.
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
from stepgauge.calibrate import host, wrappers
from stepgauge.calibrate.grids import grid_of
from stepgauge.calibrate.operations import TRACED_CALLS, TimedOperation, operations, other_work
from stepgauge.calibrate.timing import METRICS, Timing, clock_and_power, heat_of, time_of
from stepgauge.measure import devices
from stepgauge.measure.cpu_contention import Span, missed_cores, reading
from stepgauge.measure.environment import environment
from stepgauge.runtime.world import gathered_objects, this_world
from stepgauge.spec.calibration import ASKED, OPERATORS, CalibrationSpec, OperationTable
from stepgauge.spec.disturbance import MISSED_CORES, is_disturbed
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record, Sample

Row = tuple[Any, ...]


def names(device: torch.device) -> list[str]:
    """What can be calibrated there: on a CPU the host is the device, and launches nothing."""
    known = list(operations(grid_of(device.type)))
    return known if device.type == "cpu" else [*known, *host.names()]


def job(spec: CalibrationSpec) -> Job:
    """Of one operation over its grid, on one device or on ranks side by side. Raises ValueError for
    an unknown operation.
    """
    known = names(torch.device(spec.device))
    known += [OPERATORS, *(wrappers.names() if spec.ranks > 1 else [])]
    if spec.operation not in known and not host.is_host(spec.operation):
        raise ValueError(f"operation is {spec.operation!r}; choose one of {known}")
    return Job(ON_RANKS if spec.ranks > 1 else run, spec, process="calibration")


@dataclasses.dataclass
class Timed:
    """The grid's sizes with their microseconds, what the device told at each, how many shapes did
    not fit in memory or in the time, how many short ones were timed at the host's pace, and what was
    read of the cores before and after.
    """

    axes: tuple[str, ...]
    rows: list[Row]
    told: list[dict[str, float]]
    left_out: int
    at_host_pace: int = 0
    span: Span | None = None


def run(spec: CalibrationSpec) -> Record:
    device = torch.device(spec.device)
    return _record(spec, [_measured(spec, device)], device)


def _measured(spec: CalibrationSpec, device: torch.device) -> Timed:
    before = reading()
    if host.is_host(spec.operation):
        timed = _timed(host.measure(spec, device), device)
    elif spec.operation in wrappers.names():
        timed = _timed(wrappers.measure(spec, device), device)
    else:
        timed = _times(spec, device)
    after = reading()
    return dataclasses.replace(timed, span=(before, after) if before and after else None)


def _timed(table: OperationTable, device: torch.device) -> Timed:
    """With what the device tells now, once for all rows."""
    return Timed(table.axes, list(table.rows), [clock_and_power(device)] * len(table.rows), 0)


def _on_rank(spec: CalibrationSpec) -> Timed:
    return _measured(spec, this_world().device(spec.device))


def _of_ranks(spec: CalibrationSpec, ranks: list[Timed]) -> Record:
    return _record(spec, ranks, torch.device(spec.device))


ON_RANKS = OnRanks(_on_rank, _of_ranks, shared=True)


def _record(spec: CalibrationSpec, ranks: Sequence[Timed], device: torch.device) -> Record:
    """Of each shape on a CPU, which ranks share, the mean over ranks; of GPUs the slowest one's, for
    which a step waits.
    """
    slowest = max(ranks, key=lambda timed: sum(row[-1] for row in timed.rows))
    rows = slowest.rows
    if device.type == "cpu":
        rows = []
        for place, (*sizes, _) in enumerate(slowest.rows):
            mean_us = statistics.fmean(timed.rows[place][-1] for timed in ranks)
            rows.append((*sizes, mean_us))
    units = list(slowest.told[0]) if slowest.told else []
    clocks = {unit: [told[unit] for told in slowest.told] for unit in units}
    times: list[list[Any]] = [[*slowest.axes, "us", *units]]
    for row, told in zip(rows, slowest.told, strict=True):
        times.append([*row, *told.values()])
    return Record.of(
        spec,
        metrics={
            "shapes": Sample.exact(len(rows), ""),
            "shapes_left_out": Sample.exact(slowest.left_out, ""),
            "shapes_at_host_pace": Sample.exact(slowest.at_host_pace, ""),
            **{METRICS[unit]: Sample.of(values, unit) for unit, values in clocks.items()},
            **_missed(ranks, device),
        },
        tables={"times": times},
        environment=environment(device),
    )


def _missed(ranks: Sequence[Timed], device: torch.device) -> dict[str, Sample]:
    """Cores that others took; a GPU's host needs one a rank."""
    spans = [timed.span for timed in ranks if timed.span is not None]
    if not spans:
        return {}
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return {MISSED_CORES: Sample.exact(missed_cores(spans, threads), "cores")}


def _times(spec: CalibrationSpec, device: torch.device) -> Timed:
    """The operation's table on this process's device, in step with the other ranks."""
    grid = grid_of(device.type)
    are_calls = spec.operation == OPERATORS
    operation = TRACED_CALLS if are_calls else operations(grid)[spec.operation]
    matmul = "high" if spec.operation.endswith("tf32") else "highest"
    torch.set_float32_matmul_precision(matmul)
    timed = Timed(operation.axes, [], [], 0)
    deadline = time.perf_counter() + spec.seconds
    shapes = list(spec.shapes or operation.grid)
    heat_ms = heat_of(len(shapes), device)
    for sizes in shapes:
        timing = None
        if _all_agree(time.perf_counter() < deadline):
            timing = _time_of(operation, sizes, device, spec, heat_ms)
        if not _all_agree(timing is not None) or timing is None:
            timed.left_out += 1
            continue
        timed.at_host_pace += timing.at_host_pace
        timed.rows.append((*sizes, timing.us))
        timed.told.append(clock_and_power(device))
        if device.type == "cuda" and len(timed.rows) % 16 == 0:
            torch.cuda.empty_cache()
    return timed


def _all_agree(here: bool) -> bool:
    """Whether it is so on every rank, which all come to the next shape together."""
    if not dist.is_initialized():
        return here
    return all(gathered_objects(here))


def _time_of(
    operation: TimedOperation, sizes: tuple[Any, ...], device: torch.device, spec: CalibrationSpec,
    heat_ms: float,
) -> Timing | None:  # fmt: skip
    """None for a shape that does not fit in memory, and for a traced call that cannot be made by itself."""
    try:
        make = functools.partial(operation.make, *sizes, device)
        beside = other_work(operation.beside, device) if operation.beside else None
        return time_of(make, device, spec.milliseconds, beside, heat_ms=heat_ms)
    except torch.AcceleratorError:
        raise  # the device's context is lost: no later time would be right
    except Exception as error:
        too_large = devices.out_of_memory_reason(error) is not None and spec.ranks == 1
        if not too_large and operation is not TRACED_CALLS:
            raise
        return None


def with_operations(hardware: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """The file with the tables of the records in place of older ones of the same operation. What
    wrappers take of the host stands beside what a single process takes of it.
    """
    alone = dict(hardware.operations)
    by_ranks = {ranks: dict(tables) for ranks, tables in hardware.by_ranks.items()}
    for record in records:
        ranks = record.spec["ranks"]
        operation = record.spec["operation"]
        is_shared = ranks > 1 and not operation.startswith("host")
        tables = by_ranks.setdefault(ranks, {}) if is_shared else alone
        tables[_table_name(record)] = table_of(record)
    return dataclasses.replace(hardware, operations=alone, by_ranks=by_ranks)


def _table_name(record: Record) -> str:
    """Older records have no sizes of their own."""
    is_asked = record.spec.get("sizes")
    return f"{record.spec['operation']} {ASKED}" if is_asked else str(record.spec["operation"])


def table_of(record: Record) -> OperationTable:
    """The record's sizes and microseconds, without what the device told beside them."""
    head, *rows = record.tables["times"]
    end = head.index("us")
    is_on_gpu = record.spec["device"] != "cpu" and not record.spec["operation"].startswith("host")
    return OperationTable(
        axes=tuple(head[:end]),
        rows=tuple(tuple(row[: end + 1]) for row in rows),
        captured=is_on_gpu and record.median("shapes_at_host_pace") == 0,
        disturbed=is_disturbed(record),
    )
