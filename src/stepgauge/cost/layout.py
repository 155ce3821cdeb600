"""Predicts a training step under any layout: the record that `bench layout` would measure.

Without a pipeline, the streams of one rank are simulated (cost/streams/program.py). With a pipeline,
its schedule is simulated with the durations of its stages. A stage's gradients are sent after its last
backward, while other stages still compute, and each rank's optimizer follows.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from stepgauge.cost.data_axis.buckets import Bucketed, Sending
from stepgauge.cost.data_axis.fully_sharded import FullySharded
from stepgauge.cost.data_axis.wrapper_host import unknown_host
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.pipeline.cuts import blocks_of
from stepgauge.cost.pipeline.repeated import Pass
from stepgauge.cost.pipeline.stages import Halves, durations
from stepgauge.cost.pipeline.step import span_rows
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.cost.rank import (
    launch_costs_of,
    operations_of,
    peak_of,
    peak_of_stages,
    with_block_times,
)
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices, StageChain, library_of
from stepgauge.cost.step import modelled, rates
from stepgauge.cost.streams.ledger import Rows, pipeline_rows, step_rows
from stepgauge.cost.streams.outcome import exposed_ms, run_program
from stepgauge.cost.streams.passes import run_passes
from stepgauge.cost.streams.program import LaunchCost, Operations, Program, RankStep
from stepgauge.cost.timed_blocks import as_timed
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.pipeline import Schedule, lower
from stepgauge.spec.plan.pipeline.action import UNSHARD, Action
from stepgauge.spec.plan.stages import describe_balance
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.steps import work_of

NOTHING_OVERLAPS = "overlap changes nothing here: each rank's piece of a message is too small"
ONE_MICRO_BATCH = (
    "the layout has no mN, so there is one micro-batch and the pipeline's ranks work in turn"
)
# A schedule repeats itself after this many micro-batches per rank of the pipeline.
MICRO_BATCHES_UNTIL_REPEAT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """A simulated step.

    phases      ms per phase; forward and backward are one phase in a pipeline, which mixes them, and
                with accumulation
    rows        of the table of terms, for the rank that ends last
    timeline    of a pipeline
    busiest_ms  time in which the busiest rank of a pipeline computes
    busy        the mean share of forward and backward in which a rank of a pipeline computes
    bubble      the longest time that a rank waits for other stages, as a fraction of the step
    late_us     delay by a slower host
    """

    step_ms: float
    phases: Mapping[str, float]
    rows: Rows
    timeline: Timeline | None = None
    busiest_ms: float = 0.0
    busy: float = 1.0
    bubble: float = 0.0
    late_us: float = 0.0


def predict_layout(
    spec: LayoutSpec,
    machine: CalibratedMachine,
    traced: Sequence[TracedNetwork] = (),
    *,
    shortened: bool = False,
    exposed: bool = True,
) -> Record:
    """Returns the modelled record.

    traced     the stages of a network without formulas
    shortened  for planning with hundreds of layouts: micro-batches of a long pipeline are
               extrapolated from fewer of them
    exposed    with the exposed communication of each axis, which takes one more simulation per axis

    Raises ValueError for what the cost model or the hardware file does not cover.
    """
    parts = LayoutParts.of(spec, machine, traced, shortened=shortened).with_waits()
    step = parts.predicted()
    figures = {
        **{f"{phase}_ms": ms for phase, ms in step.phases.items()},
        "step_ms": step.step_ms,
        **(_exposed(parts, step) if exposed else {}),
    }
    metrics = {name: Sample.exact(value, "ms") for name, value in figures.items()}
    if step.timeline is not None:
        metrics["bubble"] = Sample.exact(step.bubble, "fraction of the step")
    sequences = spec.batch * spec.accumulation
    metrics |= rates(spec, machine, step.step_ms, sequences=sequences, ranks=spec.ranks)
    memory, note = parts.memory(), _notes(parts)
    record = modelled(spec, machine, metrics, step.rows, memory, late_us=step.late_us, note=note)
    if step.timeline is None:
        return record
    tables = {**record.tables, "spans": span_rows(step.timeline)}
    blocks = [stage.blocks for stage in parts.stages]
    balance = describe_balance(blocks, "blocks", balance=spec.balance, times="predicted")
    return dataclasses.replace(
        record, tables=tables, note="; ".join(filter(None, (balance, record.note)))
    )


def _notes(parts: "LayoutParts") -> str:
    """Returns what a user may not expect of the layout, and what is not known of its host's launches."""
    layout, prices, spec = parts.spec.parsed_layout, parts.prices, parts.spec
    notes = []
    if layout.pipeline > 1 and layout.microbatches == 1:
        notes.append(ONE_MICRO_BATCH)
    if layout.overlap and not prices.layout.overlap:
        notes.append(NOTHING_OVERLAPS)
    work, replayed = parts.stages[0].spec, spec.cuda_graphs
    notes.append(unknown_host(prices.machine, work, prices.layout, replayed=replayed))
    return "; ".join(filter(None, notes))


def _exposed(parts: "LayoutParts", step: Predicted) -> dict[str, float]:
    """Returns the exposed communication of each axis, defined as in `bench layout`.

    For most axes it is the step minus the same step without the axis's communication. For a pipeline
    it is forward and backward minus the computation of the busiest rank.
    """
    figures = {}
    layout = parts.spec.parsed_layout
    reduced = ("data",) if layout.num_replicas > 1 else ()  # also with a context axis only
    for axis in dict.fromkeys((*layout.sizes, *reduced)):
        if axis != "pipeline":
            without_ms = parts.without(axis).predicted().step_ms
            figures[f"without_{axis}_ms"] = without_ms
            figures[f"{axis}_exposed_ms"] = exposed_ms(step.step_ms, without_ms)
    if step.timeline is not None:
        figures["busiest_rank_ms"] = step.busiest_ms
        figures["pipeline_exposed_ms"] = step.phases["forward_and_backward"] - step.busiest_ms
    return figures


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


@dataclasses.dataclass(frozen=True)
class LayoutParts:
    """What a layout's step consists of: the operations of each stage, and their prices.

    stages     one if there is no pipeline
    shortened  as in predict_layout
    """

    spec: LayoutSpec
    stages: Sequence[Operations]
    prices: Prices
    schedule: Schedule | None
    shortened: bool = False

    @classmethod
    def of(
        cls,
        spec: LayoutSpec,
        machine: CalibratedMachine,
        traced: Sequence[TracedNetwork] = (),
        *,
        shortened: bool = False,
    ) -> "LayoutParts":
        """Returns the parts of a layout's step. Raises ValueError for what is not modelled."""
        layout, work = spec.parsed_layout, work_of(spec)
        if layout.torch_tensor:
            raise ValueError(f"layout is {spec.layout!r}; torch's tensor parallel is not predicted")
        share, prices = share_of(spec), Prices(machine, layout, library_of(spec))
        if traced:
            stages = [operations_of(work, share, stage) for stage in traced]
            prices = prices.at_product_share_of(StageChain(stages))
        else:
            network = StepOperations(work, share)
            if layout.overlap and not network.overlapped:  # its messages are plain collectives
                layout = dataclasses.replace(layout, overlap=False)
                prices = Prices(machine, layout, library_of(spec))
            prices = prices.at_product_share_of(network)
            times = None
            if spec.needs_times:
                times = Halves.of(as_timed(network, prices)).times(prices)
            cuts = blocks_of(spec, layout, times)
            shares = [dataclasses.replace(share, blocks=blocks) for blocks in cuts]
            stages = [operations_of(work, each) for each in shares]
        stages = [with_block_times(stage, prices) for stage in stages]
        return cls(
            spec=spec,
            stages=stages,
            prices=prices,
            schedule=spec.schedule(),
            shortened=shortened,
        )

    @functools.cached_property
    def host(self) -> dict[str, LaunchCost]:
        """The host's time by phase."""
        machine, replayed = self.prices.machine, self.spec.cuda_graphs
        return launch_costs_of(self.stages[0], machine, self.prices.host_layout, replayed=replayed)

    @property
    def sending(self) -> Sending:
        layout = self.spec.parsed_layout
        return Sending(
            wrapper=layout.wrapper,
            ranks=layout.num_replicas,
            bucket_mb=self.spec.bucket_mb,
            reduce_dtype=self.spec.reduce_dtype,
        )

    def predicted(self) -> Predicted:
        return self._pipelined(self.schedule) if self.schedule else self._single_stage()

    def rank_step(self, stage: int) -> RankStep:
        return RankStep(self.stages[stage], self.prices, self.host)

    def without(self, axis: str) -> "LayoutParts":
        """Returns the same step with communication on the axis taking no time."""
        return dataclasses.replace(self, prices=self.prices.without(axis))

    def with_waits(self) -> "LayoutParts":
        """Returns the same step with prices of GPUs that wait for other stages, as they do in it."""
        if self.schedule is None:
            return self
        network, busy = StageChain(self.stages), self.predicted().busy
        return dataclasses.replace(self, prices=self.prices.at_product_share_of(network, busy=busy))

    def memory(self) -> Memory | None:
        layout, accumulates = self.spec.parsed_layout, self.spec.accumulation > 1
        if self.schedule is None:
            return peak_of(self.stages[0], layout, accumulates=accumulates)
        plan = self._shortened(self.schedule)
        return peak_of_stages(self.stages, layout, plan, accumulates=accumulates)

    def _single_stage(self) -> Predicted:
        accumulation = self.spec.accumulation
        step = self.rank_step(0)
        simulated = run_passes(step, data_axis(self.sending, step), count=accumulation)
        phases = dict(simulated.phases)
        if accumulation > 1:
            both = phases.pop("forward") + phases.pop("backward")
            phases = {"forward_and_backward": both, **phases}
        return Predicted(
            step_ms=simulated.step_ms,
            phases=phases,
            rows=step_rows(self.stages[0], self.prices, simulated, passes=accumulation),
            late_us=simulated.late_us,
        )

    def _pipelined(self, whole: Schedule) -> Predicted:
        plan = self._shortened(whole)
        unshard_us, reduce_us = zip(*map(self._data_us, range(plan.num_stages)), strict=True)
        taken = durations(self.stages, self.prices, self.host, unshard_us)
        timeline = _simulated(plan, taken)
        ranks = [self._rank_times(timeline, plan, r, reduce_us) for r in range(plan.num_ranks)]
        last = max(ranks, key=lambda rank: rank.step_ms)
        whole_pass = self._whole_pass(timeline, taken, whole.num_micro_batches)
        skipped_ms = whole_pass.step_ms - timeline.step_ms
        accumulation = self.spec.accumulation
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
                [self.stages[number] for number in last.stages],
                self.prices,
                passes=accumulation * whole.num_micro_batches,
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

    def _rank_times(
        self, timeline: Timeline, schedule: Schedule, rank: int, reduce_us: Sequence[float]
    ) -> "RankTimes":
        """Returns the times of a rank, which reduces a stage's gradients after its last backward,
        one stage after the other.
        """
        ends = {span.action.stage: span.end for span in timeline.ranks[rank]}
        reduced_ms = 0.0
        for stage in sorted(ends, key=ends.__getitem__):
            reduced_ms = max(reduced_ms, ends[stage]) + reduce_us[stage] / 1e3
        computed_ms, stages = max(ends.values()), schedule.stages(rank)
        return RankTimes(
            stages=stages,
            computed_ms=computed_ms,
            exposed_ms=max(0.0, reduced_ms - computed_ms),
            optimizer_ms=sum(self._optimizer_ms(stage) for stage in stages),
        )

    def _shortened(self, plan: Schedule) -> Schedule:
        """Returns the schedule to simulate. If `shortened`, it ends once it repeats itself.

        gpipe never does: all forwards come first.
        """
        layout = self.spec.parsed_layout
        enough = MICRO_BATCHES_UNTIL_REPEAT * layout.pipeline
        skipped = (layout.microbatches - enough) // layout.pipeline * layout.pipeline
        if not self.shortened or skipped <= 0 or layout.schedule == "gpipe":
            return plan
        return self._schedule(layout.microbatches - skipped)

    def _schedule(self, num_micro_batches: int) -> Schedule:
        layout = self.spec.parsed_layout
        return schedule_of(dataclasses.replace(layout, microbatches=num_micro_batches))

    def _whole_pass(self, timeline: Timeline, taken: Durations, num_micro_batches: int) -> Pass:
        """Returns the simulated pass with the micro-batches that its schedule left out."""
        simulated = Pass.of(timeline, taken)
        if simulated.num_micro_batches == num_micro_batches:
            return simulated
        fewer = self._schedule(simulated.num_micro_batches - self.spec.parsed_layout.pipeline)
        before = Pass.of(_simulated(fewer, taken), taken)
        return simulated.continued(before, num_micro_batches=num_micro_batches)

    def _data_us(self, stage: int) -> tuple[float, float]:
        """Returns the time to gather a stage's weights, if they are sharded, and to reduce gradients."""
        match data_axis(self.sending, self.rank_step(stage)):
            case FullySharded() as axis:
                return axis.resident_us()
            case Bucketed() as axis:
                return 0.0, axis.messages_us()
        return 0.0, 0.0

    def _optimizer_ms(self, stage: int) -> float:
        step, program = self.rank_step(stage), Program()
        data_axis(self.sending, step).optimizer(program, step.operations, self.prices)
        return run_program(program, self.prices.contention).step_ms


def _simulated(plan: Schedule, taken: Durations) -> Timeline:
    sharded = [stage for stage in plan.rank_of if taken.of(Action(stage, UNSHARD))]
    return simulate(lower(plan, sharded=sharded), taken)


def share_of(spec: LayoutSpec) -> NetworkPart:
    """Returns the share of the network that a rank of the layout has."""
    layout = spec.parsed_layout
    return NetworkPart(
        batch=spec.micro_batch,
        tensor=layout.tensor,
        overlap=layout.overlap,
        replayed=spec.cuda_graphs,
        context=layout.context,
        ulysses=layout.ulysses,
        gathered=layout.gathers_weights,
        passes=spec.accumulation * (layout.microbatches if layout.pipeline > 1 else 1),
    )
