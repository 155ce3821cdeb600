"""A training step under any layout, predicted: the record that `bench layout` would give.

Without a pipeline a rank's step is the works of its streams (cost/streams/program.py). With one the
schedule is simulated with the durations of its stages, gradients of a stage are sent from its last
backward on, beside what other stages compute, and each rank's optimizer follows.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.data_axis.buckets import Bucketed, Sending
from stepgauge.cost.data_axis.fully_sharded import FullySharded
from stepgauge.cost.data_axis.wrapper_host import unknown_host
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.memory.peak import Memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.pipeline.cuts import blocks_of
from stepgauge.cost.pipeline.stages import Halves, durations
from stepgauge.cost.pipeline.step import span_rows
from stepgauge.cost.pipeline.timeline import Timeline, simulate
from stepgauge.cost.rank import at_pace, host_of, operations_of, peak_of, peak_of_stages
from stepgauge.cost.rates.estimate import SLOWER_HOST
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import InTurn, Prices, library_of
from stepgauge.cost.step import modelled, rates
from stepgauge.cost.streams.ledger import Rows, pipeline_rows, step_rows
from stepgauge.cost.streams.outcome import Outcome, exposed_ms, outcome
from stepgauge.cost.streams.program import Launching, Operations, Program, RankStep
from stepgauge.cost.timed_blocks import as_timed
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.pipeline import Schedule, lower
from stepgauge.spec.plan.stages import describe_balance
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.steps import work_of

SHORTEST = 3  # rounds of a pipeline's ranks, after which a schedule repeats itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a layout comes to.

    phases    ms of each; forward and backward are one where a pipeline mixes them, and where
              several batches follow each other
    rows      what the rank that ends last is the sum of
    timeline  of a pipeline
    busiest   ms in which the busiest rank of a pipeline computes
    bubble    the part of the step that the rank waits for other stages that waits longest
    late_us   by which a slower host would delay it
    """

    step_ms: float
    phases: Mapping[str, float]
    rows: Rows
    timeline: Timeline | None = None
    busiest: float = 0.0
    bubble: float = 0.0
    late_us: float = 0.0


def predict_layout(
    spec: LayoutSpec,
    machine: CalibratedMachine,
    traced: Sequence[TracedNetwork] = (),
    *,
    shortened: bool = False,
) -> Record:
    """The modelled record. `traced`: the stages of a network without formulas. Raises ValueError for
    what the cost model or the hardware file does not know. `shortened` is for layouts by the hundred:
    passes and, of a long pipeline, micro-batches that repeat one another are counted, not simulated.
    """
    parts = LayoutParts.of(spec, machine, traced, shortened=shortened)
    found = parts.predicted()
    figures = {
        **{f"{phase}_ms": ms for phase, ms in found.phases.items()},
        "step_ms": found.step_ms,
        **_exposed(parts, found),
    }
    metrics = {name: Sample.exact(value, "ms") for name, value in figures.items()}
    if found.timeline is not None:
        metrics["bubble"] = Sample.exact(found.bubble, "fraction of the step")
    sequences = spec.batch * spec.accumulation
    metrics |= rates(spec, machine, found.step_ms, sequences=sequences, ranks=spec.ranks)
    note = unknown_host(machine, parts.stages[0].spec, spec.parsed_layout)
    record = modelled(
        spec, machine, metrics, found.rows, parts.memory(), late_us=found.late_us, note=note
    )
    if found.timeline is None:
        return record
    tables = {**record.tables, "spans": span_rows(found.timeline)}
    blocks = [stage.blocks for stage in parts.stages]
    cut = describe_balance(blocks, "blocks", balance=spec.balance, times="predicted")
    return dataclasses.replace(
        record, tables=tables, note="; ".join(filter(None, (cut, record.note)))
    )


def _exposed(parts: "LayoutParts", found: Predicted) -> dict[str, float]:
    """What each axis costs the step beside computing, as bench layout has it: of data and tensor
    the step less the same step without what they send; of a pipeline forward and backward less what
    the busiest rank computes.
    """
    figures = {}
    layout = parts.spec.parsed_layout
    averaged = ("data",) if layout.num_replicas > 1 else ()
    for axis in dict.fromkeys((*layout.sizes, *averaged)):
        if axis != "pipeline":
            without = parts.without(axis).predicted().step_ms
            figures[f"without_{axis}_ms"] = without
            figures[f"{axis}_exposed_ms"] = exposed_ms(found.step_ms, without)
    if found.timeline is not None:
        figures["busiest_rank_ms"] = found.busiest
        figures["pipeline_exposed_ms"] = found.phases["forward_and_backward"] - found.busiest
    return figures


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """Of a rank of a pipeline: until it has computed forward and backward, from then until the
    gradients of its stages have arrived, and of its optimizer.
    """

    stages: Sequence[int]
    computed_ms: float
    exposed_ms: float
    optimizer_ms: float

    @property
    def gradients_ms(self) -> float:
        """Until it has all gradients."""
        return self.computed_ms + self.exposed_ms

    @property
    def step_ms(self) -> float:
        return self.gradients_ms + self.optimizer_ms


@dataclasses.dataclass(frozen=True)
class LayoutParts:
    """A layout's step taken apart: what each stage computes, at what prices.

    shortened  as predict_layout has it
    """

    spec: LayoutSpec
    stages: Sequence[Operations]
    prices: Prices
    host: dict[str, Launching]
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
        """Raises ValueError for what is not modelled."""
        layout, work = spec.parsed_layout, work_of(spec)
        if layout.torch_tensor:
            raise ValueError(f"layout is {spec.layout!r}; torch's tensor parallel is not predicted")
        share, prices = share_of(spec), Prices(machine, layout, library_of(spec))
        if traced:
            priced = [operations_of(work, share, stage) for stage in traced]
            prices = prices.paced_by(InTurn(priced))
        else:
            whole = StepOperations(work, share)
            prices = prices.paced_by(whole)
            times = Halves.of(as_timed(whole, prices)).times(prices) if spec.needs_times else None
            cuts = blocks_of(spec, layout, times)
            shares = [dataclasses.replace(share, blocks=blocks) for blocks in cuts]
            priced = [operations_of(work, each) for each in shares]
        stages = [at_pace(stage, prices) for stage in priced]
        return cls(
            spec=spec,
            stages=stages,
            prices=prices,
            host=host_of(stages[0], machine, layout, replayed=spec.cuda_graphs),
            schedule=spec.schedule(),
            shortened=shortened,
        )

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
        return self._in_stages(self.schedule) if self.schedule else self._alone()

    def rank_step(self, stage: int) -> RankStep:
        return RankStep(self.stages[stage], self.prices, self.host)

    def without(self, axis: str) -> "LayoutParts":
        """The same with nothing sent on the axis."""
        return dataclasses.replace(self, prices=self.prices.without(axis))

    def memory(self) -> Memory | None:
        layout, accumulates = self.spec.parsed_layout, self.spec.accumulation > 1
        if self.schedule is None:
            return peak_of(self.stages[0], layout, accumulates=accumulates)
        plan, _ = self._shortened(self.schedule)
        return peak_of_stages(self.stages, layout, plan, accumulates=accumulates)

    def _alone(self) -> Predicted:
        accumulation = self.spec.accumulation
        passes = min(accumulation, 2) if self.shortened else accumulation
        found = self._outcome(passes)
        if passes < accumulation:
            found = found.with_more(self._outcome(passes - 1), accumulation - passes)
        phases = dict(found.phases)
        if accumulation > 1:
            both = phases.pop("forward") + phases.pop("backward")
            phases = {"forward_and_backward": both, **phases}
        rows = step_rows(self.stages[0], self.prices, found, passes=accumulation)
        return Predicted(step_ms=found.step_ms, phases=phases, rows=rows, late_us=found.late_us)

    def _outcome(self, passes: int) -> Outcome:
        step = self.rank_step(0)
        program = step.program(data_axis(self.sending, step), passes=passes)
        return outcome(program, self.prices.contention)

    def _in_stages(self, whole: Schedule) -> Predicted:
        plan, left_out = self._shortened(whole)
        unshard_us, sent_us = zip(*map(self._data_us, range(plan.num_stages)), strict=True)
        schedule = lower(plan, sharded=plan.rank_of if any(unshard_us) else ())
        taken = durations(self.stages, self.prices, self.host, unshard_us)
        timeline = simulate(schedule, taken)
        ranks = [self._rank_times(timeline, schedule, r, sent_us) for r in range(plan.num_ranks)]
        last = max(ranks, key=lambda rank: rank.step_ms)
        # Each micro-batch that was left out keeps the busiest rank, or its host, as busy as the rest.
        issued_ms = taken.host_ms * max(len(row) for row in timeline.ranks)
        steady_ms = left_out * max(*timeline.busy_ms, issued_ms) / plan.num_micro_batches
        accumulation = self.spec.accumulation
        each_ms = timeline.step_ms + (last.exposed_ms if any(unshard_us) else 0.0)
        before_ms = (accumulation - 1) * each_ms + accumulation * steady_ms
        phases = {
            "forward_and_backward": before_ms + last.gradients_ms,
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
            busiest=accumulation * (max(timeline.busy_ms) + steady_ms),
            bubble=accumulation * max(timeline.bubbles) * timeline.step_ms / step_ms,
            late_us=1e3 * accumulation * _late_ms(issued_ms, steady_ms, timeline.step_ms),
        )

    def _rank_times(
        self, timeline: Timeline, schedule: Schedule, rank: int, sent_us: Sequence[float]
    ) -> "RankTimes":
        """Gradients of a stage leave when it has had its last backward, one stage after the other."""
        ends = {span.action.stage: span.end for span in timeline.ranks[rank]}
        arrived = 0.0
        for stage in sorted(ends, key=ends.__getitem__):
            arrived = max(arrived, ends[stage]) + sent_us[stage] / 1e3
        computed, stages = max(ends.values()), schedule.stages(rank)
        return RankTimes(
            stages=stages,
            computed_ms=computed,
            exposed_ms=max(0.0, arrived - computed),
            optimizer_ms=sum(self._optimizer_ms(stage) for stage in stages),
        )

    def _shortened(self, plan: Schedule) -> tuple[Schedule, int]:
        """A schedule that repeats itself from some micro-batch on, with fewer of them, and how many
        are left out.
        """
        layout = self.spec.parsed_layout
        enough = SHORTEST * layout.pipeline
        left = (layout.microbatches - enough) // layout.pipeline * layout.pipeline
        if not self.shortened or left <= 0:
            return plan, 0
        fewer = dataclasses.replace(layout, microbatches=layout.microbatches - left)
        return schedule_of(fewer), left

    def _data_us(self, stage: int) -> tuple[float, float]:
        """To gather the weights of a stage, where they are sharded, and to send its gradients."""
        match data_axis(self.sending, self.rank_step(stage)):
            case FullySharded() as axis:
                return axis.resident_us()
            case Bucketed() as axis:
                return 0.0, axis.messages_us()
        return 0.0, 0.0

    def _optimizer_ms(self, stage: int) -> float:
        step, program = self.rank_step(stage), Program()
        data_axis(self.sending, step).optimizer(program, step.operations, self.prices)
        return outcome(program, self.prices.contention).step_ms


def _late_ms(issued_ms: float, steady_ms: float, step_ms: float) -> float:
    """By which micro-batches take longer with a slower host, of those that were simulated and those
    that were left out.
    """
    whole_ms = step_ms + steady_ms
    return max(0.0, SLOWER_HOST * issued_ms * whole_ms / step_ms - whole_ms)


def share_of(spec: LayoutSpec) -> NetworkPart:
    """What a rank has of the network."""
    layout = spec.parsed_layout
    return NetworkPart(
        batch=spec.micro_batch,
        tensor=layout.tensor,
        overlap=layout.overlap,
        context=layout.context,
        ulysses=layout.ulysses,
        gathered=layout.gathers_weights,
        passes=spec.accumulation * (layout.microbatches if layout.pipeline > 1 else 1),
    )
