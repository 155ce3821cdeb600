"""Predicts forward and backward of a pipeline: the record that `bench pipeline` would measure."""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.stages import Halves, durations
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.cost.rank import at_step_share, launch_costs_of, operations_of, peak_of_stages
from stepgauge.cost.rates.estimate import ASSUMED, Estimate
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import ForwardBackward, Prices, StageChain
from stepgauge.cost.step import modelled
from stepgauge.cost.term_table import row_of, term_rows
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
    """Returns the modelled record, without an optimizer.

    `traced` has the stages of a network without formulas. Raises ValueError for what the cost model or
    the hardware file does not cover.
    """
    backend = "nccl" if spec.device.startswith(("cuda", "auto")) else "gloo"
    copies = spec.transport != "messages" and not spec.is_torch
    prices = Prices(machine, spec.parsed_layout, backend, copies=copies)
    _, timeline = _simulated(spec, prices, traced)
    stages, timeline = _simulated(spec, prices, traced, busy=1 - min(timeline.bubbles))
    metrics = simulated_metrics(timeline, stages.durations, batch=spec.batch)
    metrics |= throughput([timeline.step_ms], tokens=spec.batch * spec.model.context_length)
    phases = {"forward": stages.network.forward(), "backward": stages.network.backward()}
    rows = term_rows(phases, stages.prices)
    rows.append(bubble_row(timeline))
    note = spec.describe_stages(stages.parts, "predicted")
    record = modelled(spec, machine, metrics, rows, stages.memory, note=note)
    tables = {**record.tables, "spans": span_rows(timeline)}
    return dataclasses.replace(record, tables=tables)


@dataclasses.dataclass(frozen=True)
class Stages:
    """The network in stages.

    network  everything that is computed
    parts    of each stage
    memory   the peak, if it is known
    """

    network: ForwardBackward
    prices: Prices
    parts: list[range]
    durations: Durations
    memory: Memory | None = None


def _simulated(
    spec: PipelineSpec, prices: Prices, traced: Sequence[TracedNetwork], *, busy: float = 1.0
) -> tuple[Stages, Timeline]:
    """Returns the stages and their simulated step. `busy` as in Prices.at_product_share_of."""
    stages = (
        _traced_stages(spec, prices, traced, busy)
        if traced
        else _stages_of_halves(spec, prices, busy)
    )
    plan = fill_bubbles(spec.plan(), stages.durations) if spec.fill else spec.plan()
    return stages, simulate(lower(plan, ahead=spec.ahead), stages.durations)


def _traced_stages(
    spec: PipelineSpec, prices: Prices, traced: Sequence[TracedNetwork], busy: float
) -> Stages:
    work = work_of(spec)
    share = NetworkPart(batch=work.batch, passes=spec.micro_batches)
    stages = [operations_of(work, share, stage) for stage in traced]
    network = StageChain(stages)
    prices = at_step_share(prices, stages, busy=busy)
    host = launch_costs_of(stages[0], prices.machine, Layout(), replayed=spec.cuda_graphs)
    memory = None
    if not spec.cuda_graphs:  # CUDA graphs have their own memory pool, which is not predicted
        # without an optimizer, gradients stay from step to step
        memory = peak_of_stages(stages, spec.parsed_layout, spec.plan(), accumulates=True)
    taken = durations(stages, prices, host, [0.0] * len(stages))
    return Stages(network, prices, stages_of(spec), taken, memory)


def _stages_of_halves(spec: PipelineSpec, prices: Prices, busy: float) -> Stages:
    """Returns the stages of a Transformer, which can be cut between halves of blocks."""
    work = work_of(spec)
    network = StepOperations(work, NetworkPart(batch=work.batch, passes=spec.micro_batches))
    prices, halves = at_step_share(prices, [network], busy=busy), Halves.of(network)
    parts = stages_of(spec, halves.times(prices))
    host = launch_costs_of(network, prices.machine, Layout(), replayed=spec.cuda_graphs)
    taken = halves.durations(parts, prices, nbytes=network.stream_bytes, host=host)
    return Stages(network, prices, parts, taken)


def simulated_metrics(timeline: Timeline, taken: Durations, *, batch: int) -> dict[str, Sample]:
    """Returns the metrics of a simulated step with a batch of `batch` sequences."""
    launches = [taken.launch_of(span.action) for row in timeline.ranks for span in row]
    figures = {
        "step_ms": timeline.step_ms,
        "busy_ms": sum(timeline.busy_ms) / len(timeline.ranks),
        "transfer_ms": max(taken.transfers.values()),
        "host_ms": sum(launches) / len(launches),
    }
    return {
        **{name: Sample.exact(value, "ms") for name, value in figures.items()},
        "over_ideal": Sample.exact(timeline.over_ideal, ""),
        **throughput([timeline.step_ms], samples=batch),
    }


def bubble_row(timeline: Timeline) -> list[object]:
    """Returns the row of the longest time that a rank waits."""
    waits = max(timeline.bubbles) * timeline.step_ms * 1e3
    return row_of("pipeline", "bubble", "waits for other stages", Estimate(waits, ASSUMED))


def span_rows(timeline: Timeline) -> list[list[object]]:
    """Returns a record's table of when each action runs."""
    head: list[object] = ["rank", "action", "start ms", "end ms"]
    rows = [
        [rank, str(span.action), span.start, span.end]
        for rank, row in enumerate(timeline.ranks)
        for span in row
    ]
    return [head, *rows]
