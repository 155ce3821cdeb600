"""Simulates a layout's step with a pipeline.

Its schedule is simulated with the durations of its stages. A stage's gradients are sent after its last
backward, while other stages still compute, and each rank's optimizer follows.
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.data_axis.buckets import Bucketed
from stepgauge.cost.data_axis.fully_sharded import FullySharded
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.layout_parts import LayoutParts
from stepgauge.cost.pipeline.repeated import Pass
from stepgauge.cost.pipeline.stages import durations
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.cost.predicted import Predicted
from stepgauge.cost.streams.ledger import pipeline_rows
from stepgauge.cost.streams.outcome import run_program
from stepgauge.cost.streams.program import Program
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.plan.pipeline import Schedule, lower
from stepgauge.spec.plan.pipeline.action import UNSHARD, Action

# A schedule repeats itself after this many micro-batches per rank of the pipeline.
MICRO_BATCHES_UNTIL_REPEAT = 3


def predict_pipelined(parts: LayoutParts, plan: Schedule) -> Predicted:
    """Returns the step, from the simulation of `plan`, which may be shortened."""
    unshard_us, reduce_us = zip(
        *(_data_us(parts, stage) for stage in range(plan.num_stages)), strict=True
    )
    taken = durations(parts.stages, parts.prices, parts.host, unshard_us)
    timeline = _simulated(plan, taken)
    ranks = [_rank_times(parts, timeline, plan, r, reduce_us) for r in range(plan.num_ranks)]
    last = max(ranks, key=lambda rank: rank.step_ms)
    layout, accumulation = parts.spec.parsed_layout, parts.spec.accumulation
    whole_pass = _whole_pass(timeline, taken, layout)
    skipped_ms = whole_pass.step_ms - timeline.step_ms
    # ZeRO 3 reduces gradients in each pass, other wrappers in the last one only.
    pass_ms = timeline.step_ms + (last.exposed_ms if any(unshard_us) else 0.0)
    earlier_ms = (accumulation - 1) * pass_ms + accumulation * skipped_ms
    phases = {
        "forward_and_backward": earlier_ms + last.gradients_ms,
        "optimizer": last.optimizer_ms,
    }
    step_ms = sum(phases.values())
    return Predicted(
        step_ms=step_ms,
        phases=phases,
        rows=pipeline_rows(
            [parts.stages[number] for number in last.stages],
            parts.prices,
            passes=accumulation * layout.microbatches,
            exposed_ms=last.exposed_ms,
            optimizer_ms=last.optimizer_ms,
            step_ms=step_ms,
        ),
        timeline=timeline,
        busiest_ms=accumulation * max(whole_pass.busy_ms),
        busy=whole_pass.busy,
        bubble=accumulation * whole_pass.waiting_ms / step_ms,
        late_us=1e3 * accumulation * whole_pass.late_ms,
    )


def shortened_schedule(layout: Layout) -> Schedule:
    """Returns the layout's schedule up to where it repeats itself.

    gpipe never does: all forwards come first.
    """
    enough = MICRO_BATCHES_UNTIL_REPEAT * layout.pipeline
    skipped = (layout.microbatches - enough) // layout.pipeline * layout.pipeline
    if skipped <= 0 or layout.schedule == "gpipe":
        return schedule_of(layout)
    return _schedule(layout, layout.microbatches - skipped)


def _schedule(layout: Layout, num_micro_batches: int) -> Schedule:
    return schedule_of(dataclasses.replace(layout, microbatches=num_micro_batches))


def _simulated(plan: Schedule, taken: Durations) -> Timeline:
    sharded = [stage for stage in plan.rank_of if taken.of(Action(stage, UNSHARD))]
    return simulate(lower(plan, sharded=sharded), taken)


def _whole_pass(timeline: Timeline, taken: Durations, layout: Layout) -> Pass:
    """Returns the simulated pass with the micro-batches that its schedule left out."""
    simulated = Pass.of(timeline, taken)
    if simulated.num_micro_batches == layout.microbatches:
        return simulated
    fewer = _schedule(layout, simulated.num_micro_batches - layout.pipeline)
    before = Pass.of(_simulated(fewer, taken), taken)
    return simulated.continued(before, num_micro_batches=layout.microbatches)


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """The step of a pipeline rank.

    computed_ms   from the start until forward and backward of its stages are computed
    exposed_ms    from then until the gradients of its stages are reduced
    optimizer_ms  from then until its parameters are updated
    """

    stages: Sequence[int]
    computed_ms: float
    exposed_ms: float
    optimizer_ms: float

    @property
    def gradients_ms(self) -> float:
        """From the start until all gradients are reduced."""
        return self.computed_ms + self.exposed_ms

    @property
    def step_ms(self) -> float:
        return self.gradients_ms + self.optimizer_ms


def _rank_times(
    parts: LayoutParts, timeline: Timeline, plan: Schedule, rank: int, reduce_us: Sequence[float]
) -> RankTimes:
    """Returns the times of a rank, which reduces a stage's gradients after its last backward, one stage
    after the other.
    """
    ends = {span.action.stage: span.end for span in timeline.ranks[rank]}
    reduced_ms = 0.0
    for stage in sorted(ends, key=ends.__getitem__):
        reduced_ms = max(reduced_ms, ends[stage]) + reduce_us[stage] / 1e3
    computed_ms, stages = max(ends.values()), plan.stages(rank)
    return RankTimes(
        stages=stages,
        computed_ms=computed_ms,
        exposed_ms=max(0.0, reduced_ms - computed_ms),
        optimizer_ms=sum(_optimizer_ms(parts, stage) for stage in stages),
    )


def _data_us(parts: LayoutParts, stage: int) -> tuple[float, float]:
    """Returns the time to gather a stage's weights, if they are sharded, and to reduce gradients."""
    match data_axis(parts.sending, parts.rank_step(stage)):
        case FullySharded() as axis:
            return axis.resident_us()
        case Bucketed() as axis:
            return 0.0, axis.messages_us()
    return 0.0, 0.0


def _optimizer_ms(parts: LayoutParts, stage: int) -> float:
    step, program = parts.rank_step(stage), Program()
    data_axis(parts.sending, step).optimizer(program, step.operations, parts.prices)
    return run_program(program, parts.prices.contention).step_ms
