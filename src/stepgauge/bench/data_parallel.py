"""Times a data-parallel step on several ranks: `ON_RANKS` measures a DataParallelSpec."""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from stepgauge.bench import build
from stepgauge.bench.rank_figures import (
    RankFigures,
    kept_bytes,
    record_of_ranks,
    slowest_step,
    time_steps,
)
from stepgauge.bench.ranks import OnRanks, slowest
from stepgauge.bench.rates import user_samples
from stepgauge.bench.traced import STEPS, TraceFigures, trace_steps
from stepgauge.measure import devices
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.parallel.graphed_gradients import recorded
from stepgauge.parallel.training import Parallelise
from stepgauge.parallel.wrappers import parallelise
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.runtime.world import this_world
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.throughput import StepWork, throughput
from stepgauge.train.layout import wrapper_settings
from stepgauge.train.precision import PRECISIONS
from stepgauge.train.step import TrainingStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelFigures(RankFigures):
    """The figures of one rank of a data-parallel step.

    without_communication  ms of the step with communication off; empty if it cannot be turned off
    communication          ms of communication without compute; empty if it cannot run separately
    plan                   number of buckets and bytes of the last one, if the wrapper has buckets
    traced                 overlap of the profiled steps; None without tracing or communication
    """

    without_communication: list[float]
    communication: list[float]
    plan: dict[str, int]
    traced: TraceFigures | None


def measure(spec: DataParallelSpec) -> DataParallelFigures:
    """Measures the step on this rank. All ranks must call it. Raises torch's errors, mostly out of
    memory.
    """
    world = this_world()
    device = world.device(spec.device)
    step, batch = build_on_rank(spec, device, world.rank)
    initial = devices.allocated_memory(device)
    phases = step.phases(batch)
    with step.precision.matmul_mode():
        times, span = time_steps(spec, phases, device)
        kept = kept_bytes(step, phases, device, initial, has_graphs=spec.cuda_graphs)
        traced = trace_steps(phases, device) if spec.trace else None
        communication = _time_communication(step, phases, device, spec.steps)
        # Last, because ranks that do not communicate end with different weights.
        without = _time_without_communication(step, phases, device, spec.steps)
    buckets = getattr(step.parallel.module, "buckets", ())
    return DataParallelFigures(
        phases=times,
        bytes=kept,
        span=span,
        optimizer=step.optimizer_name,
        samples=user_samples(spec, batch),
        without_communication=without,
        communication=communication,
        plan={"buckets": len(buckets), "tail_bytes": buckets[-1].bytes} if buckets else {},
        traced=traced,
    )


def build_on_rank(
    spec: DataParallelSpec, device: torch.device, rank: int
) -> tuple[TrainingStep, Sequence[Any]]:
    """Returns this rank's step and batch. All ranks must call it."""
    settings = wrapper_settings(spec, spec.wrapper)
    wrap: Parallelise = functools.partial(parallelise, spec.wrapper, settings=settings)
    if spec.cuda_graphs:
        context = functools.partial(PRECISIONS[spec.precision].autocasting, device)
        wrap = recorded(wrap, CudaGraphs(device), context)
    return build.build(spec, device, rank=rank, parallelise=wrap)


def _time_communication(
    step: TrainingStep, phases: Phases, device: torch.device, steps: int
) -> list[float]:
    """Returns ms of the step's communication without compute; empty if it cannot run separately."""
    communicate = step.parallel.communicate
    if communicate is None:
        return []
    for name in ("forward", "backward"):  # fill the gradients
        phases[name]()
    times = time_phases({"communication": communicate}, device, warmup=2, steps=steps)["step"]
    phases["optimizer"]()
    return times


def _time_without_communication(
    step: TrainingStep, phases: Phases, device: torch.device, steps: int
) -> list[float]:
    """Returns ms of the step with communication off; empty if it cannot be turned off."""
    if "data" not in step.parallel.without_axis:
        return []
    with step.parallel.without_axis["data"]():
        return time_phases(phases, device, warmup=2, steps=steps)["step"]


def record(spec: DataParallelSpec, ranks: list[DataParallelFigures]) -> Record:
    """Returns the record of all ranks' figures."""
    work = StepWork.of(spec.model, sequences=spec.batch * spec.ranks)
    samples = sum(rank.samples for rank in ranks)
    traced = [rank.traced for rank in ranks if rank.traced]
    return record_of_ranks(
        spec,
        ranks,
        rates=throughput(slowest_step(ranks), samples=samples, tokens=work.tokens),
        figures={**_communication(ranks), **_overlap(traced), **_plan(ranks[0].plan)},
        series=traced[0].tracks if traced else {},
    )


def _communication(ranks: list[DataParallelFigures]) -> dict[str, Sample]:
    metrics: dict[str, Sample] = {}
    if ranks[0].communication:
        communication = slowest([rank.communication for rank in ranks])
        metrics["communication_ms"] = Sample.of(communication, "ms")
    if ranks[0].without_communication:
        without = slowest([rank.without_communication for rank in ranks])
        exposed = statistics.median(slowest_step(ranks)) - statistics.median(without)
        metrics["without_communication_ms"] = Sample.of(without, "ms")
        metrics["exposed_ms"] = Sample.exact(exposed, "ms")
    return metrics


def _overlap(ranks: list[TraceFigures]) -> dict[str, Sample]:
    if not ranks:
        return {}
    overlaps = [rank.overlap for rank in ranks]
    exposed_us = [each.exposed_us / STEPS for each in overlaps]
    communication_us = [each.communication_us / STEPS for each in overlaps]
    return {
        "overlap_ratio": Sample.of((each.ratio for each in overlaps), "of communication"),
        "traced_exposed_us": Sample.of(exposed_us, "us"),
        "traced_communication_us": Sample.of(communication_us, "us"),
        "profiled_step_ms": Sample.of(slowest([rank.step_ms for rank in ranks]), "ms"),
    }


def _plan(plan: dict[str, int]) -> dict[str, Sample]:
    units = {"buckets": "", "tail_bytes": "bytes"}
    return {name: Sample.exact(value, units[name]) for name, value in plan.items()}


ON_RANKS = OnRanks(measure=measure, record=record)
