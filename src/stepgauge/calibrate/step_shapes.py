"""Times what certain steps need, before they are predicted.

These are operations at exactly the steps' shapes, because between the shapes of a grid a kernel's tiles
fill the multiprocessors differently; and the host's launches, whose speed changes within minutes.
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
MAX_UPDATED = 4e9  # parameters; with their optimizer state, these are 64 GB


def shape_jobs(shapes: Mapping[tuple[int, str], Set[Shape]], device: torch.device) -> list[Job]:
    """Returns the jobs that time shapes, given by ranks and operation.

    Ranks on GPUs time them at the same time, because a step waits for the slowest one.
    """
    grid = grid_of(device.type)
    known = operations(grid)
    jobs = []
    for (ranks, operation), requested in sorted(shapes.items()):
        are_calls = operation == OPERATORS
        timed = requested if are_calls else {
            sizes for sizes in requested if operation in known and _is_timed(operation, sizes)
        }  # fmt: skip
        if timed:
            spec = CalibrationSpec(
                operation=operation, sizes=_calls(timed) if are_calls else _text(timed), ranks=ranks,
                milliseconds=TIMED_MS, seconds=(10 if are_calls else 1) * grid.time_limit_s,
                device=str(device),
            )  # fmt: skip
            jobs.append(run.job(spec))
    return jobs


def host_job(spec: Any, turn: int) -> Job | None:
    """Returns the job that times the host for launches like those of the spec, right before its row.

    `turn` is the number of the row. It runs on as many ranks as the row, or on those of one stage if a
    stage has several. A wrapper's buckets shrink in proportion to the blocks. Returns None
    on a CPU, where nothing is launched; for compile modes whose launches are not timed; and for compiled
    steps of several ranks, because each rank would have to compile.
    """
    mode = next((mode for mode, compile in MODES.items() if compile == spec.compile), None)
    if mode is None or spec.device.startswith("cpu") or (mode != "eager" and spec.ranks > 1):
        return None
    # compiled, casts are part of other launches, so that one table covers all precisions
    dtype = "bf16" if spec.precision in ("bf16", "fp16") or mode != "eager" else "fp32"
    layout = spec.parsed_layout
    ranks = layout.launched.ranks if layout.launched.ranks > 1 else spec.ranks
    suffix = launched_under(layout, spec.checkpointing)
    scale = 1.0 if WRAPPERS[layout.wrapper].buckets else 0.0
    if scale and isinstance(spec.model, ModelSpec):
        narrow = narrow_network(1, heads=2).block_matrix_parameters
        scale = narrow / spec.model.block_matrix_parameters
    return run.job(
        CalibrationSpec(
            operation=f"host {mode} {dtype}{suffix}", turn=turn, ranks=ranks,
            bucket_mb=scale * getattr(spec, "bucket_mb", 0.0), device=spec.device,
        )
    )  # fmt: skip


def median_probe(probes: Sequence[Record]) -> Record:
    """Returns the last probe of the host, with the medians over all probes of the same launches.

    A single probe was off by a factor of up to 2.5 (docs/log/2026-11-23-timed-right-before.md).
    """
    last = probes[-1]
    head, *rows = last.tables["times"]
    us = head.index("us")
    same = [probe.tables["times"] for probe in probes if _launches(probe) == _launches(last)]
    medians = []
    for index, row in enumerate(rows, start=1):
        median_us = statistics.median(times[index][us] for times in same)
        medians.append([*row[:us], median_us, *row[us + 1 :]])
    return dataclasses.replace(last, tables={**last.tables, "times": [head, *medians]})


def _launches(probe: Record) -> dict[str, Any]:
    return {name: value for name, value in probe.spec.items() if name != "turn"}


def _is_timed(operation: str, sizes: Shape) -> bool:
    """Returns True if a shape can be timed.

    Compiled passes are left out, because each shape would be compiled. Passes over heads need whole heads.
    """
    if operation.startswith("compiled") or any(size != int(size) for size in sizes):
        return False
    if operation.startswith(("heads", "split")):
        m, n = sizes
        return m % BATCH == 0 and n % (2 * HEAD_WIDTH) == 0
    return not operation.startswith("optimizer") or sizes[0] <= MAX_UPDATED


def _calls(shapes: Iterable[tuple[Any, ...]]) -> str:
    return json.dumps(sorted(call for (call,) in shapes))


def _text(shapes: Iterable[Shape]) -> str:
    return " ".join("x".join(str(int(size)) for size in shape) for shape in sorted(shapes))
