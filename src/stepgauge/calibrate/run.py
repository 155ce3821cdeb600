"""A CalibrationSpec run: `run` gives the record of one operation, `hardware_file` a machine's file.

Shapes follow one another without a pause, so that a GPU runs at the clock and power that it holds
in a training step, and not at those of a short burst; both stand in the record.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

from stepgauge.calibrate import host
from stepgauge.calibrate.operations import Call, Operation, operations
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.spec.calibration import CalibrationSpec, OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record, Sample

LOOPS = 3
SHORT_US = 500.0  # shorter calls may be launched slower than they run
MOST_CALLS = 200
LONGEST_S = 20.0  # of one operation over all its shapes


def names(device: torch.device) -> list[str]:
    """What can be calibrated there: on a CPU the host is the device, and launches nothing."""
    if device.type == "cpu":
        return list(operations(small=True))
    return [*operations(small=False), *host.names()]


def run(spec: CalibrationSpec) -> Record:
    """Times one operation over its grid. Shapes that do not fit in memory are left out.

    Raises ValueError for an unknown operation.
    """
    device = torch.device(spec.device)
    if spec.operation not in names(device):
        raise ValueError(f"operation is {spec.operation!r}; choose one of {names(device)}")
    if spec.operation in host.names():
        table, left_out = host.measure(spec.operation, device), 0
    else:
        operation = operations(small=device.type == "cpu")[spec.operation]
        table, left_out = _times(operation, device, spec)
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics={
            "shapes": Sample.exact(len(table.rows), ""),
            "shapes_left_out": Sample.exact(left_out, ""),
            **_clocks(device),
        },
        tables={"times": [[*table.axes, "us"], *(list(row) for row in table.rows)]},
        environment=environment(device),
    )


def _times(
    operation: Operation, device: torch.device, spec: CalibrationSpec
) -> tuple[OperationTable, int]:
    """The table, and how many shapes did not fit in memory or in the time."""
    matmul = "high" if spec.operation.endswith("tf32") else "highest"
    torch.set_float32_matmul_precision(matmul)
    rows: list[tuple[float, ...]] = []
    left_out = 0
    deadline = time.perf_counter() + LONGEST_S
    for sizes in operation.grid:
        if time.perf_counter() > deadline:
            left_out += 1
            continue
        try:
            rows.append((*sizes, _microseconds(operation.make(*sizes, device), device, spec)))
        except (RuntimeError, MemoryError) as error:
            if devices.out_of_memory_reason(error) is None:
                raise
            left_out += 1
        if device.type == "cuda" and len(rows) % 16 == 0:
            torch.cuda.empty_cache()
    return OperationTable(operation.axes, tuple(rows)), left_out


def _microseconds(call: Call, device: torch.device, spec: CalibrationSpec) -> float:
    """Median over loops of the mean of a loop's calls."""
    call()
    once = _loop(call, device, 2)
    count = max(2, min(MOST_CALLS, round(spec.milliseconds * 1e3 / max(once, 1e-3))))
    if device.type == "cuda" and once < SHORT_US:
        replay = _captured(call, count)
        return statistics.median(_loop(replay, device, 2) for _ in range(LOOPS)) / count
    return statistics.median(_loop(call, device, count) for _ in range(LOOPS))


def _captured(call: Call, count: int) -> Call:
    """The calls as one CUDA graph: short ones would else be timed at the host's pace. Where they
    cannot be captured, the calls themselves.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
    except RuntimeError:
        torch.cuda.synchronize()

        def calls() -> None:
            for _ in range(count):
                call()

        return calls
    return graph.replay


def _loop(call: Call, device: torch.device, count: int) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e6 / count
    before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        call()
    after.record()
    devices.synchronize(device)
    return before.elapsed_time(after) * 1e3 / count


def _clocks(device: torch.device) -> dict[str, Sample]:
    """The GPU's clock and power at the end of the loops."""
    if device.type != "cuda":
        return {}
    return {
        "sm_clock_mhz": Sample.exact(torch.cuda.clock_rate(device), "MHz"),
        "power_w": Sample.exact(torch.cuda.power_draw(device) / 1e3, "W"),
    }


def hardware_file(name: str, records: Sequence[Record], before: HardwareFile) -> HardwareFile:
    """The file with the tables of the records in place of older ones of the same operation."""
    tables = dict(before.operations)
    for record in records:
        head, *rows = record.tables["times"]
        tables[record.spec["operation"]] = OperationTable(
            tuple(head[:-1]), tuple(tuple(row) for row in rows)
        )
    device = next((str(record.environment["device"]) for record in records), before.device)
    return dataclasses.replace(before, name=name, device=device, operations=tables)
