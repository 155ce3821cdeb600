"""Profiles a training step: `run` times the step of a ProfileSpec, profiles it, and analyses the
trace. It returns the record and writes traces and analysis to a folder.
"""

import contextlib
import dataclasses
import time
from pathlib import Path

import torch

from stepgauge.bench.build import build, check
from stepgauge.bench.host_memory import require_memory
from stepgauge.measure import devices
from stepgauge.measure.ceilings import ceilings
from stepgauge.measure.environment import environment
from stepgauge.measure.profiler import ProfilerSchedule, profile_phases
from stepgauge.measure.ranges import module_ranges
from stepgauge.measure.timing import time_phases
from stepgauge.report.profile_page import folder_of, write
from stepgauge.spec.analysis import Analysis
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.trace.analysis import analyse
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.step import TrainingStep


def run(spec: ProfileSpec, *, folder: Path) -> Record:
    """Times the step, profiles it, analyses the trace, and returns the record.

    Raises ValueError for a combination that the spec cannot have, MemoryError if host memory is too
    small, and torch's own errors, mostly out of memory.
    """
    check(spec)
    device = torch.device(spec.device)
    require_memory(spec)
    pending = Record.of(spec)
    run_folder = folder_of(pending, folder)
    precision = PRECISIONS[spec.precision]
    analysis, stopwatch, costs, optimizer = _profiled(spec, device, run_folder)
    devices.reset_peak_memory(device)  # the model is gone; its memory is free for the ceilings
    with precision.matmul_mode():
        limits = ceilings(device, precision.autocast or precision.parameters)
    analysis = dataclasses.replace(analysis, ceilings=limits)
    write(analysis, run_folder)
    return dataclasses.replace(
        pending,
        metrics={**metrics(analysis, stopwatch), **costs},
        environment={**environment(device), "optimizer": optimizer},
    )


def _profiled(
    spec: ProfileSpec, device: torch.device, folder: Path
) -> tuple[Analysis, dict[str, Sample], dict[str, Sample], str]:
    """Times and profiles the step, and writes the traces to the folder. Returns the analysis, the
    unprofiled times of the phases, the costs of profiling, and the optimizer's name.
    """
    step, batch = build(spec, device)
    phases = step.phases(batch, until=spec.phases)
    schedule = ProfilerSchedule(
        wait=spec.wait, warmup=spec.profiler_warmup, active=spec.active, repeat=spec.repeat
    )
    with step.precision.matmul_mode():
        times = time_phases(
            phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds
        )
        host_bytes, start = devices.peak_host_memory(), time.perf_counter()
        with _ranges(spec, step, device):
            traces, profiled_ms = profile_phases(
                phases, device, folder, schedule=schedule, stacks=spec.stacks
            )
    stopwatch = {name: Sample.of(values, "ms") for name, values in times.items()}
    analysis = dataclasses.replace(
        analyse(*traces),
        source=traces[0].name,
        stopwatch_ms={name: sample.median for name, sample in stopwatch.items()},
        watched_ms=profiled_ms,
    )
    seconds = time.perf_counter() - start - schedule.steps * stopwatch["step"].median / 1e3
    costs = {
        "profiling_s": Sample.exact(seconds, "s"),
        "profiling_host_bytes": Sample.exact(devices.peak_host_memory() - host_bytes, "bytes"),
        "trace_bytes": Sample.exact(sum(trace.stat().st_size for trace in traces), "bytes"),
    }
    return analysis, stopwatch, costs, step.optimizer_name


def _ranges(
    spec: ProfileSpec, step: TrainingStep, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Names the modules in the trace, unless the step is compiled: a compiled graph has no modules,
    and hooks would change it.
    """
    if spec.compile != "off":
        return contextlib.nullcontext()
    return module_ranges(step.module, nvtx=device.type == "cuda")


def metrics(analysis: Analysis, stopwatch: dict[str, Sample]) -> dict[str, Sample]:
    """Returns the ms of each phase, unprofiled and profiled, and the ms per step of each kind of work.
    A phase and a kind may have the same name.
    """
    result = {f"{name}_ms": sample for name, sample in stopwatch.items()}
    phases = {phase: values for phase, values in analysis.phases_us.items() if phase}
    for phase, values in phases.items():
        result[f"profiled_{phase}_ms"] = Sample.of([us / 1e3 for us in values], "ms")
    step_ms = [sum(values) / 1e3 for values in zip(*phases.values(), strict=True)]
    result["profiled_step_ms"] = Sample.of(step_ms, "ms")
    kinds: dict[str, float] = {}
    for cell in (cell for cell in analysis.cells if cell.calls):
        kinds[cell.kind] = kinds.get(cell.kind, 0.0) + cell.us
    for kind, us in sorted(kinds.items(), key=lambda item: -item[1]):
        result[f"kind_{kind}_ms"] = Sample.exact(us / 1e3 / analysis.steps, "ms")
    if analysis.on_device:
        idle_us = sum(row.us for row in analysis.idle if row.phase)
        result["idle_ms"] = Sample.exact(idle_us / 1e3 / analysis.steps, "ms")
    if analysis.overlap:
        exposed_us = analysis.overlap.exposed_us
        result["overlap_ratio"] = Sample.exact(analysis.overlap.ratio, "")
        result["exposed_ms"] = Sample.exact(exposed_us / 1e3 / analysis.steps, "ms")
    return result
