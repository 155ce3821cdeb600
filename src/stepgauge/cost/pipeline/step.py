"""A pipeline's step, predicted: the record that `bench pipeline` would give."""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.memory.peak import Memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.stages import Halves, durations
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.cost.rank import host_of, operations_of, peak_of_stages
from stepgauge.cost.rates.estimate import ASSUMED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Computing, InTurn, Prices
from stepgauge.cost.step import modelled, term_rows
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline import lower
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.steps import work_of
from stepgauge.spec.throughput import throughput


def predict_pipeline(
    spec: PipelineSpec, machine: CalibratedMachine, traced: Sequence[TracedNetwork] = ()
) -> Record:
    """The modelled record: forward and backward, no optimizer. `traced`: the stages of a network
    without formulas. Raises ValueError for what the cost model or the hardware file does not know.
    """
    backend = "nccl" if spec.device.startswith(("cuda", "auto")) else "gloo"
    schedule = lower(spec.plan(), ahead=spec.ahead)
    prices = Prices(machine, spec.parsed_layout, backend)
    cut = _of_stages(spec, prices, traced) if traced else _of_halves(spec, prices)
    whole, prices, parts, taken = cut.whole, cut.prices, cut.parts, cut.taken
    if spec.fill:
        schedule = lower(fill_bubbles(spec.plan(), taken), ahead=spec.ahead)
    timeline = simulate(schedule, taken)
    metrics = simulated_metrics(timeline, taken, batch=spec.batch)
    metrics |= throughput([timeline.step_ms], tokens=spec.batch * spec.model.context_length)
    rows = term_rows({"forward": whole.forward(), "backward": whole.backward()}, prices)
    rows.append(bubble_row(timeline))
    record = modelled(spec, machine, metrics, rows, cut.memory)
    tables = {**record.tables, "spans": span_rows(timeline)}
    note = spec.describe_stages(parts, "predicted")
    return dataclasses.replace(record, tables=tables, note=note)


@dataclasses.dataclass(frozen=True)
class Cut:
    """All that is computed, at its prices; the parts of each stage, and how long they take; the peak
    where it is known.
    """

    whole: Computing
    prices: Prices
    parts: list[range]
    taken: Durations
    memory: Memory | None = None


def _of_stages(spec: PipelineSpec, prices: Prices, traced: Sequence[TracedNetwork]) -> Cut:
    work = work_of(spec)
    share = NetworkPart(batch=work.batch, passes=spec.micro_batches)
    stages = [operations_of(work, share, stage) for stage in traced]
    whole = InTurn(stages)
    prices = prices.paced_by(whole)
    host = host_of(stages[0], prices.machine, Layout(), replayed=spec.cuda_graphs)
    taken = durations(stages, prices, host, [0.0] * len(stages))
    memory = None
    if not spec.cuda_graphs:  # which keep memory of their own
        # without an optimizer gradients stay from step to step
        memory = peak_of_stages(stages, spec.parsed_layout, spec.plan(), accumulates=True)
    return Cut(whole, prices, stages_of(spec), taken, memory)


def _of_halves(spec: PipelineSpec, prices: Prices) -> Cut:
    """Of the Transformer, whose halves of blocks are known."""
    work = work_of(spec)
    whole = StepOperations(work, NetworkPart(batch=work.batch, passes=spec.micro_batches))
    prices, halves = prices.paced_by(whole), Halves.of(whole)
    parts = stages_of(spec, halves.times(prices))
    host = host_of(whole, prices.machine, Layout(), replayed=spec.cuda_graphs)
    nbytes = whole.stream_bytes
    taken = halves.durations(parts, prices, nbytes=nbytes, host=host)
    return Cut(whole, prices, parts, taken)


def simulated_metrics(timeline: Timeline, taken: Durations, *, batch: int) -> dict[str, Sample]:
    """Of a step that was simulated from what its actions take; `batch` sequences go through it."""
    figures = {
        "step_ms": timeline.step_ms,
        "busy_ms": sum(timeline.busy_ms) / len(timeline.ranks),
        "transfer_ms": max(taken.transfers.values()),
        "host_ms": taken.host_ms,
    }
    return {
        **{name: Sample.exact(value, "ms") for name, value in figures.items()},
        "over_ideal": Sample.exact(timeline.over_ideal, ""),
        **throughput([timeline.step_ms], samples=batch),
    }


def bubble_row(timeline: Timeline) -> list[object]:
    """What the rank that waits longest waits."""
    waits = max(timeline.bubbles) * timeline.step_ms * 1e3
    return ["pipeline", "bubble", "waits for other stages", "", 1, waits, ASSUMED]


def span_rows(timeline: Timeline) -> list[list[object]]:
    head: list[object] = ["rank", "action", "start ms", "end ms"]
    rows = [
        [rank, str(span.action), span.start, span.end]
        for rank, row in enumerate(timeline.ranks)
        for span in row
    ]
    return [head, *rows]
