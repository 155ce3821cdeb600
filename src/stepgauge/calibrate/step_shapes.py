"""What certain steps ask of a machine, timed for them before they are predicted: operations at their
very shapes (between those of a grid a kernel's tiles fill the multiprocessors otherwise), and what
the host takes for their launches, whose pace changes within minutes.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from stepgauge.bench.sweep import Job
from stepgauge.calibrate import run
from stepgauge.calibrate.grids import grid_of
from stepgauge.calibrate.host import MODES, narrow_network
from stepgauge.calibrate.machine import TIMED_MS
from stepgauge.calibrate.operations import operations
from stepgauge.calibrate.passes import BATCH, HEAD_WIDTH
from stepgauge.spec.calibration import OPERATORS, CalibrationSpec, launched_under
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record

Shape = tuple[Any, ...]
MOST_UPDATED = 4e9  # parameters of an optimizer, which are 64 GB with their state


def shape_jobs(shapes: Mapping[tuple[int, str], Set[Shape]], device: torch.device) -> list[Job]:
    """Of operations by ranks and name: on GPUs side by side, since a step waits for the slowest."""
    grid = grid_of(device.type)
    known = operations(grid)
    found = []
    for (ranks, operation), asked in sorted(shapes.items()):
        are_calls = operation == OPERATORS
        timed = asked if are_calls else {
            sizes for sizes in asked if operation in known and _is_timed(operation, sizes)
        }  # fmt: skip
        if timed:
            spec = CalibrationSpec(
                operation=operation, sizes=_calls(timed) if are_calls else _text(timed), ranks=ranks,
                milliseconds=TIMED_MS, seconds=(10 if are_calls else 1) * grid.longest_s,
                device=str(device),
            )  # fmt: skip
            found.append(run.job(spec))
    return found


def host_job(spec: Any, turn: int) -> Job | None:
    """What the host takes for a step that is launched as the spec's, to be timed right before it:
    the row of that number. A wrapper's buckets are as much smaller as the blocks are. None on a CPU,
    which launches nothing, for what is compiled otherwise than the host is timed, and for
    compiled steps of several ranks, each of which would compile for it.
    """
    mode = next((mode for mode, compile in MODES.items() if compile == spec.compile), None)
    if mode is None or spec.device.startswith("cpu") or (mode != "eager" and spec.ranks > 1):
        return None
    casts = spec.precision in ("bf16", "fp16") or mode != "eager"  # compiled, part of a launch
    kind = "bf16" if casts else "fp32"
    layout = spec.parsed_layout
    under = launched_under(layout, spec.checkpointing)
    narrower = 1.0 if WRAPPERS[layout.wrapper].buckets else 0.0
    if narrower and isinstance(spec.model, ModelSpec):
        narrow = narrow_network(1, heads=2).block_matrix_parameters
        narrower = narrow / spec.model.block_matrix_parameters
    return run.job(
        CalibrationSpec(
            operation=f"host {mode} {kind}{under}", turn=turn, ranks=spec.ranks,
            bucket_mb=narrower * getattr(spec, "bucket_mb", 0.0), device=spec.device,
        )
    )  # fmt: skip


def usual_host(probes: Sequence[Record]) -> Record:
    """The last probe of the host with the medians of all that timed the same launches: one by itself
    was off by up to 2.5 times (docs/log/2026-11-23-timed-right-before.md).
    """
    last = probes[-1]
    head, *rows = last.tables["times"]
    us = head.index("us")
    alike = [probe.tables["times"] for probe in probes if _launches(probe) == _launches(last)]
    medians = []
    for place, row in enumerate(rows, start=1):
        median_us = statistics.median(times[place][us] for times in alike)
        medians.append([*row[:us], median_us, *row[us + 1 :]])
    return dataclasses.replace(last, tables={**last.tables, "times": [head, *medians]})


def _launches(probe: Record) -> dict[str, Any]:
    return {name: value for name, value in probe.spec.items() if name != "turn"}


def _is_timed(operation: str, sizes: Shape) -> bool:
    """Compiled passes would be compiled anew for each shape; heads have whole heads."""
    if operation.startswith("compiled") or any(size != int(size) for size in sizes):
        return False
    if operation.startswith(("heads", "split")):
        m, n = sizes
        return m % BATCH == 0 and n % (2 * HEAD_WIDTH) == 0
    return not operation.startswith("optimizer") or sizes[0] <= MOST_UPDATED


def _calls(shapes: Iterable[tuple[Any, ...]]) -> str:
    return json.dumps(sorted(call for (call,) in shapes))


def _text(shapes: Iterable[Shape]) -> str:
    return " ".join("x".join(str(int(size)) for size in shape) for shape in sorted(shapes))
