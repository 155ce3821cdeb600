"""Times the training step of a StepSpec: `run` returns the measured record."""

import time
from collections.abc import Callable

import torch

from stepgauge.bench.build import build, check
from stepgauge.bench.checkpoint_budget import solve
from stepgauge.bench.host_memory import require_memory
from stepgauge.bench.rates import rates, user_samples
from stepgauge.measure import cpu_contention, devices
from stepgauge.measure.cpu_contention import missed_metric, span_since
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import time_phases
from stepgauge.runtime.progress import report_progress
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec


def run(spec: StepSpec) -> Record:
    """Builds, warms up and times the step, and returns its record.

    Raises ValueError for a combination that the spec cannot have, MemoryError if host memory is too
    small, and torch's own errors, mostly out of memory.
    """
    check(spec)
    device = torch.device(spec.device)
    require_memory(spec)
    report_progress("builds")
    solution = solve(spec)
    step, batch = build(spec, device, recompute=solution.plan)
    phases = step.phases(batch, until=spec.phases)
    with step.precision.matmul_mode():
        compile_s = _first_call(phases, device) if spec.compile != "off" else None
        devices.reset_peak_memory(device)
        before = cpu_contention.reading()
        times = time_phases(
            phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds
        )
        span = span_since(before)
    where = {**environment(device), "optimizer": step.optimizer_name, **solution.environment()}
    samples = user_samples(spec, batch)
    metrics = _metrics(spec, times, device, compile_s, samples)
    if device.type == "cpu":
        metrics |= missed_metric([span], torch.get_num_threads())
    return Record.of(spec, metrics=metrics, environment=where, note=solution.note)


def _first_call(phases: dict[str, Callable[[], None]], device: torch.device) -> float:
    """Runs the step once, in which torch.compile compiles it, and returns its seconds."""
    report_progress("compiles in its first step")
    start = time.perf_counter()
    for phase in phases.values():
        phase()
    devices.synchronize(device)
    return time.perf_counter() - start


def _metrics(
    spec: StepSpec,
    times: dict[str, list[float]],
    device: torch.device,
    compile_s: float | None,
    samples: int,
) -> dict[str, Sample]:
    metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in times.items()}
    metrics |= rates(spec, times["step"], sequences=spec.batch, samples=samples)
    metrics |= {
        name: Sample.exact(value, "bytes") for name, value in devices.peak_memory(device).items()
    }
    if compile_s is not None:
        metrics["compile_s"] = Sample.exact(
            max(0.0, compile_s - metrics["step_ms"].median / 1e3), "s"
        )
    return metrics
