"""A ProfileSpec run: stopwatch, profiler, analysis. `run` gives its record; the rest lies in a
folder beside it.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from stepgauge.bench.build import build, check, least_bytes
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
    """Times the step, profiles it, analyses the trace. Raises what torch raises: out of memory,
    mostly.
    """
    check(spec)
    device = torch.device(spec.device)
    if device.type == "cpu":
        devices.require_host_memory(least_bytes(spec))
    asked = Record.of(spec)
    place = folder_of(asked, folder)
    precision = PRECISIONS[spec.precision]
    found, stopwatch, costs, optimizer = _profiled(spec, device, place)
    devices.reset_peak_memory(device)  # the model's memory is free for the ceilings
    with precision.matmul_mode():
        limits = ceilings(device, precision.autocast or precision.parameters)
    found = dataclasses.replace(found, ceilings=limits)
    write(found, place)
    return dataclasses.replace(
        asked,
        metrics={**metrics(found, stopwatch), **costs},
        environment={**environment(device), "optimizer": optimizer},
    )


def _profiled(
    spec: ProfileSpec, device: torch.device, place: Path
) -> tuple[Analysis, dict[str, Sample], dict[str, Sample], str]:
    """The analysis, the phases by the stopwatch, what profiling costs, and the optimizer's name;
    traces go to the place.
    """
    step, batch = build(spec, device)
    phases = step.phases(batch, until=spec.phases)
    with step.precision.matmul_mode():
        watch = time_phases(
            phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds
        )
        before, start = devices.peak_host_memory(), time.perf_counter()
        with _ranges(spec, step, device):
            plan = ProfilerSchedule(
                wait=spec.wait, warmup=spec.profiler_warmup, active=spec.active, repeat=spec.repeat
            )
            traces, watched = profile_phases(
                phases, device, place, schedule=plan, stacks=spec.stacks
            )
    stopwatch = {name: Sample.of(values, "ms") for name, values in watch.items()}
    found = dataclasses.replace(
        analyse(*traces),
        source=traces[0].name,
        stopwatch_ms={name: sample.median for name, sample in stopwatch.items()},
        watched_ms=watched,
    )
    seconds = time.perf_counter() - start - plan.steps * stopwatch["step"].median / 1e3
    costs = {
        "profiling_s": Sample.exact(seconds, "s"),
        "profiling_host_bytes": Sample.exact(devices.peak_host_memory() - before, "bytes"),
        "trace_bytes": Sample.exact(sum(trace.stat().st_size for trace in traces), "bytes"),
    }
    return found, stopwatch, costs, step.optimizer_name


@contextlib.contextmanager
def _ranges(spec: ProfileSpec, step: TrainingStep, device: torch.device) -> Iterator[None]:
    """Ranges of the modules, unless they are compiled: a graph has none, and hooks would change it."""
    if spec.compile != "off":
        yield
        return
    with module_ranges(step.module, nvtx=device.type == "cuda"):
        yield


def metrics(found: Analysis, stopwatch: dict[str, Sample]) -> dict[str, Sample]:
    """Phases by stopwatch and by profiler, and ms a step of each kind of work; phase and kind may
    share a name.
    """
    result = {f"{name}_ms": sample for name, sample in stopwatch.items()}
    for phase, values in found.phases_us.items():
        if phase:
            result[f"profiled_{phase}_ms"] = Sample.of([us / 1e3 for us in values], "ms")
    phases = [values for phase, values in found.phases_us.items() if phase]
    whole = [sum(values) / 1e3 for values in zip(*phases, strict=True)]
    result["profiled_step_ms"] = Sample.of(whole, "ms")
    kinds: dict[str, float] = {}
    for cell in (cell for cell in found.cells if cell.calls):
        kinds[cell.kind] = kinds.get(cell.kind, 0.0) + cell.us
    for kind, us in sorted(kinds.items(), key=lambda item: -item[1]):
        result[f"kind_{kind}_ms"] = Sample.exact(us / 1e3 / found.steps, "ms")
    if found.on_device:
        result["idle_ms"] = Sample.exact(
            sum(row.us for row in found.idle if row.phase) / 1e3 / found.steps, "ms"
        )
    if found.overlap:
        result["overlap_ratio"] = Sample.exact(found.overlap.ratio, "")
        result["exposed_ms"] = Sample.exact(found.overlap.exposed_us / 1e3 / found.steps, "ms")
    return result
