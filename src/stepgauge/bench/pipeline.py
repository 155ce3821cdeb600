"""A PipelineSpec run on ranks: `jobs` gives what simulates its step, from what each stage takes
alone, and then what measures it.
"""

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgauge.bench.pipeline_alone import Probed, StagesAlone, durations
from stepgauge.bench.pipeline_bytes import levels
from stepgauge.bench.pipeline_parts import build_stage, heavier, mean_loss, times_of
from stepgauge.bench.pipeline_torch import TorchPipeline
from stepgauge.bench.rank_figures import held_table, spans_table
from stepgauge.bench.ranks import OnRanks, require_ranks, slowest
from stepgauge.bench.sweep import Job
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.step import simulated_metrics, span_rows
from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.runtime.recording import CudaGraphs
from stepgauge.runtime.world import gathered_objects, this_world
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline import Schedule, lower
from stepgauge.spec.plan.pipeline import check as require_runnable
from stepgauge.spec.plan.stages import PartTimes
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.throughput import throughput
from stepgauge.train.build import batch_for
from stepgauge.train.layout import num_counted
from stepgauge.train.precision import PRECISIONS

IDLE = 0.05  # of the step; schedules that differ less in what a rank waits share times of stages
# What the parts of a network were measured to take, by what that depends on.
PART_TIMES: dict[tuple[Any, ...], PartTimes] = {}
# Schedules whose W were placed anew: a row and its prediction have the same.
FILLED: dict[PipelineSpec, Schedule] = {}


def check(spec: PipelineSpec) -> None:
    """Raises ValueError for what the machine has not, and for a schedule that cannot run."""
    require_ranks(spec)
    require_runnable(spec.plan())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineFigures:
    """What one rank measured: ms of each step, spans of one (action, start, end), what it held
    (ms, bytes from then on) where that is known, bytes by name; the parts of each stage.
    """

    steps: list[float]
    spans: list[tuple[str, float, float]]
    held: list[tuple[float, float]]
    bytes: dict[str, int]
    parts: list[range]


def measure(spec: PipelineSpec) -> PipelineFigures:
    """Runs on every rank. Raises what torch raises: out of memory, mostly."""
    with PipelineBench(spec) as bench:
        bench.warm_up()
        return bench.figures()


def probe(spec: PipelineSpec) -> Probed:
    """Runs on every rank: its stages alone, without any schedule."""
    with PipelineBench(dataclasses.replace(spec, schedule=spec.ours)) as bench:
        bench.warm_up(steps=1)
        return bench.probed()


def plan_of(spec: PipelineSpec) -> Schedule:
    """The schedule of a row, not lowered. All ranks must call it."""
    if not spec.fill:
        return spec.plan()
    if spec not in FILLED:
        told = gathered_objects(probe(dataclasses.replace(spec, fill=False)))
        FILLED[spec] = fill_bubbles(spec.plan(), durations(told, spec.num_stages))
    return FILLED[spec]


class PipelineBench:
    """The pipeline of a row on this rank, with its batch."""

    def __init__(self, spec: PipelineSpec):
        self.spec = spec
        self._schedule = lower(plan_of(spec), ahead=spec.ahead)
        self.precision = PRECISIONS[spec.precision]
        self.device = this_world().device(spec.device)
        tokens, targets, *_ = batch_for(spec.model, spec.batch, spec.seed + 1)
        self.batch = ((tokens.to(self.device),), (targets.to(self.device),))
        self.parts = stages_of(spec, self._times() if spec.needs_times else None)
        self.pipeline = self._build()

    def _build(self) -> Pipeline | TorchPipeline:
        spec, dtype = self.spec, self.precision.parameters

        def make(stage: int) -> nn.Module:
            model = heavier(spec)
            return build_stage(spec, model, self.parts[stage], device=self.device, dtype=dtype)

        schedule = self._schedule
        if not spec.is_torchs:
            return Pipeline(
                make,
                schedule,
                loss=mean_loss,
                share=num_counted if isinstance(spec.model, BertSpec) else None,
                device=self.device,
                context=self._context,
                transport=spec.transport,
                recording=True,
                graphs=CudaGraphs(self.device) if spec.cuda_graphs else None,
            )
        modules = {stage: make(stage) for stage in schedule.stages(dist.get_rank())}
        return TorchPipeline(
            spec.ours,
            modules,
            num_stages=schedule.num_stages,
            micro_batches=spec.micro_batches,
            device=self.device,
            loss=mean_loss,
            context=self._context,
        )

    def _times(self) -> PartTimes:
        """Measured once in a process: a row and its prediction have the same stages."""
        spec = self.spec
        asked = (
            spec.model,
            spec.micro_batch,
            spec.ranks,
            spec.precision,
            spec.compile,
            spec.device,
        )
        if asked not in PART_TIMES:
            with self.precision.matmul_mode():
                dtype, context = self.precision.parameters, self._context
                times = times_of(spec, device=self.device, dtype=dtype, context=context)
                PART_TIMES[asked] = times
        return PART_TIMES[asked]

    def _context(self) -> Any:
        return self.precision.autocasting(self.device)

    def __enter__(self) -> "PipelineBench":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipeline.close()
        del self.pipeline
        devices.free_unused_memory(self.device)

    def warm_up(self, steps: int = 0) -> None:
        for _ in range(steps or self.spec.warmup):
            self.step()
        devices.synchronize(self.device)

    def step(self) -> None:
        with self.precision.matmul_mode():
            self.pipeline.step(*self.batch)

    def figures(self) -> PipelineFigures:
        """The timed steps. All ranks must call it."""
        devices.reset_peak_memory(self.device)
        steps = [self.timed_step() for _ in range(self.spec.steps)]
        found = devices.peak_memory(self.device)
        kept = devices.kept_by_graphs(self.device) if self.spec.cuda_graphs else 0
        if "peak_bytes" in found:
            found["peak_bytes"] += kept
        spans = self.spans()
        return PipelineFigures(
            steps=steps, spans=spans, held=self._held(spans, kept), bytes=found, parts=self.parts
        )

    def timed_step(self) -> float:
        """ms from when all ranks are there to when this one has finished."""
        devices.synchronize(self.device)
        dist.barrier()
        devices.synchronize(self.device)
        start = time.perf_counter()
        self.step()
        devices.synchronize(self.device)
        return (time.perf_counter() - start) * 1e3

    def spans(self) -> list[tuple[str, float, float]]:
        if not isinstance(self.pipeline, Pipeline):
            return []
        return [(str(action), start, end) for action, start, end in self.pipeline.spans]

    def _held(self, spans: list[tuple[str, float, float]], kept: int) -> list[tuple[float, float]]:
        """Of one more step, which is not timed, on the time axis of the last one."""
        if not isinstance(self.pipeline, Pipeline) or devices.allocated_memory(self.device) is None:
            return []
        held = levels(
            self.pipeline, lambda: kept + (devices.allocated_memory(self.device) or 0), self.step
        )
        times = [ms for _, start, end in spans for ms in (start, end)]
        return list(zip(times, held, strict=True))

    def probed(self) -> Probed:
        """What the stages take alone. All ranks must call it, after a step."""
        assert isinstance(self.pipeline, Pipeline), "torch's pipelines cannot be asked"
        spec = self.spec
        asked = (spec.model, spec.micro_batch, spec.precision, spec.compile)
        how = (*asked, spec.seed, spec.device, spec.cuda_graphs)
        alike = simulate(self._schedule, Durations.of_stages(spec.num_stages))
        idle = round(alike.bubbles[dist.get_rank()] / IDLE) * IDLE
        return StagesAlone(
            self.pipeline,
            self.batch,
            self.parts,
            how,
            recorded=spec.cuda_graphs,
            idle=min(idle, 1 - IDLE),  # a pause is not endless
        ).probed()


def measured(spec: PipelineSpec, ranks: list[PipelineFigures]) -> Record:
    """One record of all ranks' figures: of each step the slowest rank, of bytes the most."""
    steps = slowest([rank.steps for rank in ranks])
    tokens = spec.batch * spec.model.context_length
    metrics = {
        "step_ms": Sample.of(steps, "ms"),
        **throughput(steps, samples=spec.batch, tokens=tokens),
    }
    series: dict[str, list[float]] = {}
    tables: dict[str, list[list[Any]]] = {}
    for name in ranks[0].bytes:
        values = [float(rank.bytes[name]) for rank in ranks]
        metrics[name] = Sample.exact(max(values), "bytes")
        series[f"rank_{name}"] = values
    if all(rank.spans for rank in ranks):
        busy = [sum(end - start for _, start, end in rank.spans) for rank in ranks]
        metrics["busy_ms"] = Sample.exact(sum(busy) / len(busy), "ms")
        tables = spans_table([rank.spans for rank in ranks])
        tables |= held_table([rank.held for rank in ranks])
    asked = _asked(spec, ranks[0].parts)
    return Record.of(spec, series=series, metrics=metrics, tables=tables, **asked)


def modelled(spec: PipelineSpec, ranks: list[Probed]) -> Record:
    """The same schedule simulated: provenance "modelled"."""
    schedule = lower(FILLED.get(spec) or spec.plan(), ahead=spec.ahead)
    taken = durations(ranks, spec.num_stages)
    timeline = simulate(schedule, taken)
    metrics = simulated_metrics(timeline, taken, batch=spec.batch)
    series: dict[str, list[float]] = {}
    tables: dict[str, list[list[Any]]] = {"spans": span_rows(timeline)}
    if any(rank.base_bytes for rank in ranks):
        held = {stage: own for rank in ranks for stage, own in rank.held.items()}
        peaks = require_runnable(schedule, held=held).peak
        levels = []
        for rank, points in zip(ranks, timeline.held(held), strict=True):
            levels.append([(ms, rank.base_bytes + level) for ms, level in points])
        tables |= held_table(levels)
        series["rank_peak_bytes"] = [
            rank.base_bytes + peak + rank.within_bytes
            for rank, peak in zip(ranks, peaks, strict=True)
        ]
        metrics["peak_bytes"] = Sample.exact(max(series["rank_peak_bytes"]), "bytes")
    asked = _asked(spec, ranks[0].parts, "modelled")
    return Record.of(spec, metrics=metrics, series=series, tables=tables, **asked)


def _asked(spec: PipelineSpec, parts: list[range], provenance: str = "measured") -> dict[str, Any]:
    return {
        "environment": environment(torch.device(spec.device)),
        "provenance": provenance,
        "note": spec.describe_stages(parts, "measured"),
    }


MEASURED = OnRanks(measure=measure, record=measured, shared=True)
PREDICTED = OnRanks(measure=probe, record=modelled, shared=True)


def jobs(spec: PipelineSpec) -> list[Job]:
    """The prediction, on disk before the row that it is of is run."""
    return [Job(PREDICTED, spec, provenance="modelled"), Job(MEASURED, spec)]
