"""Times a step of a parallel layout on its ranks: `ON_RANKS` measures a LayoutSpec.

Exposed communication is measured per axis. For data, context and tensor it is the time of the step
minus the time of the same step without that axis's collectives. A pipeline cannot run without its
transfers, so its exposed time is forward and backward minus the compute time of the busiest rank: it
includes both transfers and bubbles. Each is the difference of two medians over the timed steps.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.bench.checkpoint_budget import Solution, solve
from stepgauge.bench.rank_figures import (
    RankFigures,
    kept_bytes,
    record_of_ranks,
    slowest_step,
    spans_table,
    time_steps,
)
from stepgauge.bench.ranks import OnRanks, slowest
from stepgauge.bench.rates import rates, user_samples
from stepgauge.measure import devices
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.runtime.progress import report_progress
from stepgauge.runtime.world import this_world
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.plan.stages import FLOPS, describe_balance
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import batch_for
from stepgauge.train.layout import build_layout_step, stages_of
from stepgauge.train.rank_share import RankShare
from stepgauge.train.step import TrainingStep
from stepgauge.train.user_layout import build_user_layout_step

Spans = list[tuple[str, float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutFigures(RankFigures):
    """The figures of one rank of a layout.

    without_axis  ms of steps without an axis's communication, by axis
    spans         (action, start, end) of each pipeline action in the last timed step, in ms
    busy_ms       ms in which this rank of a pipeline computed, one value per timed step
    stages        the blocks of each stage; only for our own networks
    solution      the solved checkpointing budget
    """

    without_axis: dict[str, list[float]]
    spans: Spans
    busy_ms: list[float]
    stages: Sequence[range]
    solution: Solution


def measure(spec: LayoutSpec) -> LayoutFigures:
    """Measures the step on this rank. All ranks must call it. Raises torch's errors, mostly out of
    memory.
    """
    world = this_world()
    device = world.device(spec.device)
    solution = solve(dataclasses.replace(spec, device=str(device)))
    place = RankShare.of(spec.parsed_layout, world.rank)
    step, batches, stages = _build(spec, place, device, solution.plan)
    phases = phases_of(step, batches)
    initial = devices.allocated_memory(device)
    spans: list[Spans] = []  # of each timed step
    with step.precision.matmul_mode():
        times, span = time_steps(
            spec, phases, device, after_step=lambda: spans.append(_last_spans(step))
        )
        kept = kept_bytes(step, phases, device, initial, has_graphs=spec.cuda_graphs)
        # Last, because ranks that do not communicate end with different weights.
        without_axis = _time_without_axes(step, phases, device, spec.steps)
    return LayoutFigures(
        phases=times,
        bytes=kept,
        span=span,
        optimizer=step.optimizer_name,
        samples=sum(user_samples(spec, batch) for batch in batches),
        without_axis=without_axis,
        spans=spans[-1],
        busy_ms=[spec.accumulation * sum(end - start for _, start, end in each) for each in spans],
        stages=stages,
        solution=solution,
    )


def _last_spans(step: TrainingStep) -> Spans:
    """Returns the spans of the last step; none without a pipeline. It waits for a GPU."""
    if step.parallel.spans is None:
        return []
    return [(str(action), start, end) for action, start, end in step.parallel.spans()]


def _build(
    spec: LayoutSpec,
    place: RankShare,
    device: torch.device,
    recompute: RecomputePlan | None,
) -> tuple[TrainingStep, list[Sequence[Any]], Sequence[range]]:
    """Returns this rank's step, the batches whose gradients it accumulates, and the blocks of each
    stage, which are unknown for a user's model. All ranks must call it.
    """
    if isinstance(spec.model, UserModel):
        built = build_user_layout_step(
            spec, layout=spec.parsed_layout, device=device, lr=LEARNING_RATE
        )
        numbers = (n * place.data_ranks + place.data_rank for n in range(spec.accumulation))
        return built.step, [built.arguments(number) for number in numbers], ()
    stages = stages_of(spec, spec.parsed_layout, device)
    step = build_layout_step(
        spec,
        layout=spec.parsed_layout,
        device=device,
        recording=True,
        stages=stages,
        recompute=recompute,
        lr=LEARNING_RATE,
    )
    seeds = (spec.seed + 1 + number for number in range(spec.accumulation))
    batches = (batch_for(spec.network, spec.batch, seed) for seed in seeds)
    shares: list[Sequence[Any]] = [
        [part.to(device) for part in place.shares(batch)] for batch in batches
    ]
    return step, shares, stages


def phases_of(step: TrainingStep, batches: Sequence[Sequence[Any]]) -> Phases:
    """Returns the phases of a step. Forward and backward are a single phase if a pipeline schedule
    interleaves them or if several batches are accumulated.
    """
    if len(batches) == 1:
        return step.phases(batches[0])

    def forward_and_backward() -> None:
        step.accumulate(batches, count=len(batches))

    return {"forward_and_backward": forward_and_backward, "optimizer": step.update}


def _time_without_axes(
    step: TrainingStep, phases: Phases, device: torch.device, steps: int
) -> dict[str, list[float]]:
    """Returns ms of the step without one axis's communication, for each axis that can be left out."""
    contexts, times = step.parallel.without_axis, {}
    for axis in sorted(contexts, reverse=True):
        report_progress(f"without communication of {axis}")
        with contexts[axis]():
            times[axis] = time_phases(phases, device, warmup=2, steps=steps)["step"]
    return times


def record(spec: LayoutSpec, ranks: list[LayoutFigures]) -> Record:
    """Returns the record of all ranks' figures: the slowest rank's times and the largest bytes."""
    exposed = _exposed(spec, ranks).items()
    data_ranks = spec.parsed_layout.data
    samples = sum(rank.samples for rank in ranks) * data_ranks // spec.ranks
    sequences = spec.batch * spec.accumulation
    result = record_of_ranks(
        spec,
        ranks,
        rates=rates(
            spec, slowest_step(ranks), sequences=sequences, samples=samples, ranks=spec.ranks
        ),
        figures={f"{name}_ms": Sample.exact(ms, "ms") for name, ms in exposed},
        series={},
        tables=spans_table([rank.spans for rank in ranks]),
        note=_note(spec, ranks[0]),
    )
    budget = ranks[0].solution.environment()
    return dataclasses.replace(result, environment={**result.environment, **budget})


def _exposed(spec: LayoutSpec, ranks: list[LayoutFigures]) -> dict[str, float]:
    """Returns the exposed ms of each axis and the ms they are derived from, by name: medians over the
    timed steps, and their differences.
    """
    step_ms = statistics.median(slowest_step(ranks))
    times = {}
    for axis in ranks[0].without_axis if spec.ranks > 1 else ():
        without = statistics.median(slowest([rank.without_axis[axis] for rank in ranks]))
        times[f"without_{axis}"], times[f"{axis}_exposed"] = without, step_ms - without
    if ranks[0].spans:
        whole = statistics.median(slowest_step(ranks, "forward_and_backward"))
        busiest = statistics.median(slowest([rank.busy_ms for rank in ranks]))
        times["busiest_rank"], times["pipeline_exposed"] = busiest, whole - busiest
    return times


def _note(spec: LayoutSpec, rank: LayoutFigures) -> str:
    """Returns the record's note: how stages were cut if that was measured, how a checkpointing budget
    was solved, and why the data axis has no exposed time.
    """
    balance = spec.balance if spec.needs_times else FLOPS
    cut = describe_balance(rank.stages, "blocks", balance=balance, times="measured")
    notes = [*filter(None, (cut, rank.solution.note))]
    if spec.parsed_layout.num_replicas > 1 and "data" not in rank.without_axis:
        wrapper = spec.parsed_layout.wrapper
        notes.append(
            f"data exposed is not measured: {wrapper} cannot compute without its communication"
        )
    return "; ".join(notes)


ON_RANKS = OnRanks(measure=measure, record=record)
