"""Predicts and measures a pipeline step on several ranks. `jobs` returns two jobs of a PipelineSpec:
the first lets each rank rehearse its actions and simulates the step, the second measures the step.
"""

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgauge.bench.pipeline_bytes import memory_during
from stepgauge.bench.pipeline_parts import build_stage, heavier, mean_loss, times_of
from stepgauge.bench.pipeline_probe import RankProbe, StageProber, durations
from stepgauge.bench.pipeline_rehearsal import rehearse
from stepgauge.bench.pipeline_torch import TorchPipeline
from stepgauge.bench.rank_figures import held_table, spans_table
from stepgauge.bench.ranks import OnRanks, require_ranks, slowest
from stepgauge.bench.sweep import Job
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.step import simulated_metrics, span_rows
from stepgauge.cost.pipeline.timeline import simulate
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

# By device. The first rehearsal pauses as stages timed alone imply, the second as the first one's times
# imply, since a GPU's speed depends on its pauses.
REHEARSALS = {"cuda": 2, "cpu": 1}
# Measured times of a network's parts, by the spec's fields that they depend on.
PART_TIMES: dict[tuple[Any, ...], PartTimes] = {}
# Schedules whose W actions were moved into bubbles: a row and its prediction use the same one.
FILLED: dict[PipelineSpec, Schedule] = {}


def check(spec: PipelineSpec) -> None:
    """Raises ValueError if the machine lacks precision or GPUs, or if the schedule cannot run."""
    require_ranks(spec)
    require_runnable(spec.plan())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineFigures:
    """The figures of one rank.

    steps  ms of each step
    spans  (action, start, end) of each action in the last step, in ms
    held   (ms, bytes from then on) of a step; empty if memory is not counted
    bytes  memory metrics by name
    parts  the network parts of each stage
    """

    steps: list[float]
    spans: list[tuple[str, float, float]]
    held: list[tuple[float, float]]
    bytes: dict[str, int]
    parts: list[range]


def measure(spec: PipelineSpec) -> PipelineFigures:
    """Measures the step on this rank. All ranks must call it. Raises torch's errors, mostly out of
    memory.
    """
    with PipelineBench(spec) as bench:
        bench.warm_up(spec.warmup)
        return bench.figures()


def probe(spec: PipelineSpec) -> RankProbe:
    """Times this rank's actions without the other ranks. All ranks must call it."""
    with PipelineBench(dataclasses.replace(spec, schedule=spec.ours)) as bench:
        bench.warm_up(1)
        return bench.probe()


def plan_of(spec: PipelineSpec) -> Schedule:
    """Returns the row's schedule before lowering. All ranks must call it."""
    if not spec.fill:
        return spec.plan()
    if spec not in FILLED:
        probes = gathered_objects(probe(dataclasses.replace(spec, fill=False)))
        FILLED[spec] = fill_bubbles(spec.plan(), durations(probes, spec.num_stages))
    return FILLED[spec]


class PipelineBench:
    """The pipeline of a row on this rank, with its batch. A context manager that frees it."""

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
        if not spec.is_torch:
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
        """Returns the times of the network's parts. They are measured once per process, so that a
        row and its prediction have the same stages.
        """
        spec = self.spec
        key = (spec.model, spec.micro_batch, spec.ranks, spec.precision, spec.compile, spec.device)
        if key not in PART_TIMES:
            with self.precision.matmul_mode():
                dtype, context = self.precision.parameters, self._context
                PART_TIMES[key] = times_of(spec, device=self.device, dtype=dtype, context=context)
        return PART_TIMES[key]

    def _context(self) -> Any:
        return self.precision.autocasting(self.device)

    def __enter__(self) -> "PipelineBench":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipeline.close()
        del self.pipeline
        devices.free_unused_memory(self.device)

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        devices.synchronize(self.device)

    def step(self) -> None:
        with self.precision.matmul_mode():
            self.pipeline.step(*self.batch)

    def figures(self) -> PipelineFigures:
        """Times the spec's steps. All ranks must call it."""
        devices.reset_peak_memory(self.device)
        steps = [self._timed_step() for _ in range(self.spec.steps)]
        peaks = devices.peak_memory(self.device)
        graph_bytes = devices.kept_by_graphs(self.device) if self.spec.cuda_graphs else 0
        if "peak_bytes" in peaks:
            peaks["peak_bytes"] += graph_bytes
        spans = []
        if isinstance(self.pipeline, Pipeline):
            spans = [(str(action), start, end) for action, start, end in self.pipeline.spans]
        held = self._held(spans, graph_bytes)
        return PipelineFigures(steps=steps, spans=spans, held=held, bytes=peaks, parts=self.parts)

    def _timed_step(self) -> float:
        """Returns ms from the moment when all ranks are ready until this rank has finished."""
        devices.synchronize(self.device)
        dist.barrier()
        devices.synchronize(self.device)
        start = time.perf_counter()
        self.step()
        devices.synchronize(self.device)
        return (time.perf_counter() - start) * 1e3

    def _held(
        self, spans: list[tuple[str, float, float]], graph_bytes: int
    ) -> list[tuple[float, float]]:
        """Runs one more step and returns its memory over time, on the time axis of the last timed
        step.
        """
        if not isinstance(self.pipeline, Pipeline) or devices.allocated_memory(self.device) is None:
            return []

        def level() -> float:
            return graph_bytes + (devices.allocated_memory(self.device) or 0)

        held = memory_during(self.step, self.pipeline, level)
        times = [ms for _, start, end in spans for ms in (start, end)]
        return list(zip(times, held, strict=True))

    def probe(self) -> RankProbe:
        """Times the stages in isolation, then in the order of the schedule, with the pauses of a step
        that is simulated with the times so far. All ranks must call it, after a step.
        """
        assert isinstance(self.pipeline, Pipeline), "torch's pipelines cannot be probed"
        alone = probe = self._prober(self.pipeline).run()
        for _ in range(REHEARSALS[self.device.type]):
            expected = durations(gathered_objects(probe), self.spec.num_stages)
            spans = simulate(self._schedule, expected).ranks[dist.get_rank()]
            rehearsed = rehearse(self.pipeline, self.step, spans)
            probe = dataclasses.replace(alone, actions={**alone.actions, **rehearsed})
        return probe

    def _prober(self, pipeline: Pipeline) -> StageProber:
        spec = self.spec
        key = (
            spec.model, spec.micro_batch, spec.precision, spec.compile, spec.seed, spec.device,
            spec.cuda_graphs,
        )  # fmt: skip
        return StageProber(pipeline, self.batch, self.parts, key, uses_graphs=spec.cuda_graphs)


def measured(spec: PipelineSpec, ranks: list[PipelineFigures]) -> Record:
    """Returns the record of all ranks' figures: the slowest rank's times and the largest bytes."""
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
    return Record.of(
        spec, series=series, metrics=metrics, tables=tables, **_provenance(spec, ranks[0].parts)
    )


def modelled(spec: PipelineSpec, ranks: list[RankProbe]) -> Record:
    """Simulates the schedule with the measured times of its stages and returns the modelled record."""
    schedule = lower(FILLED.get(spec) or spec.plan(), ahead=spec.ahead)
    stage_durations = durations(ranks, spec.num_stages)
    timeline = simulate(schedule, stage_durations)
    metrics = simulated_metrics(timeline, stage_durations, batch=spec.batch)
    series: dict[str, list[float]] = {}
    tables: dict[str, list[list[Any]]] = {"spans": span_rows(timeline)}
    if any(rank.base_bytes for rank in ranks):
        held = {stage: bytes for rank in ranks for stage, bytes in rank.held.items()}
        peaks = require_runnable(schedule, held=held).peak
        levels = []
        for rank, points in zip(ranks, timeline.held(held), strict=True):
            levels.append([(ms, rank.base_bytes + level) for ms, level in points])
        tables |= held_table(levels)
        series["rank_peak_bytes"] = [
            rank.base_bytes + peak for rank, peak in zip(ranks, peaks, strict=True)
        ]
        metrics["peak_bytes"] = Sample.exact(max(series["rank_peak_bytes"]), "bytes")
    provenance = _provenance(spec, ranks[0].parts, "modelled")
    return Record.of(spec, metrics=metrics, series=series, tables=tables, **provenance)


def _provenance(
    spec: PipelineSpec, parts: list[range], provenance: str = "measured"
) -> dict[str, Any]:
    return {
        "environment": environment(torch.device(spec.device)),
        "provenance": provenance,
        "note": spec.describe_stages(parts, "measured"),
    }


MEASURED = OnRanks(measure=measure, record=measured)
PREDICTED = OnRanks(measure=probe, record=modelled)


def jobs(spec: PipelineSpec) -> list[Job]:
    """Returns the job of the prediction, whose record is written first, and that of the row."""
    return [Job(PREDICTED, spec, provenance="modelled"), Job(MEASURED, spec)]
