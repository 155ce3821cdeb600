"""A pipeline's step, predicted: the record that `bench pipeline` would give."""

import dataclasses

from stepgauge.cost.host import launching
from stepgauge.cost.memory.activations import stream_bytes
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.stages import Halves
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.cost.rates.estimate import ASSUMED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.step import modelled, term_rows
from stepgauge.spec.fields import as_kind
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline import lower
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.throughput import throughput


def predict_pipeline(spec: PipelineSpec, machine: CalibratedMachine) -> Record:
    """The modelled record: forward and backward, no optimizer. Raises ValueError for what the cost
    model or the hardware file does not know.
    """
    whole = _whole(spec)
    layout = Layout(pipeline=spec.ranks, schedule=spec.ours if spec.ranks > 1 else "")
    backend = "nccl" if spec.device.startswith(("cuda", "auto")) else "gloo"
    prices = Prices(machine, layout, backend).paced_by(whole)
    schedule = lower(spec.plan(), ahead=spec.ahead)
    host = launching(whole.spec, machine)
    halves = Halves.of(whole)
    parts = stages_of(spec, halves.times(prices))
    taken = halves.durations(parts, schedule, prices, nbytes=stream_bytes(whole), host=host)
    if spec.fill:
        schedule = lower(fill_bubbles(spec.plan(), taken), ahead=spec.ahead)
    timeline = simulate(schedule, taken)
    metrics = simulated_metrics(timeline, taken, batch=spec.batch)
    tokens = spec.batch * whole.model.context_length
    metrics |= throughput([timeline.step_ms], tokens=tokens)
    rows = term_rows({"forward": whole.forward(), "backward": whole.backward()}, prices)
    rows.append(bubble_row(timeline))
    record = modelled(spec, machine, metrics, rows, None)
    tables = {**record.tables, "spans": span_rows(timeline)}
    note = spec.describe_stages(parts, "predicted")
    return dataclasses.replace(record, tables=tables, note=note)


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


def _whole(spec: PipelineSpec) -> StepOperations:
    """The network as one rank would run it, a micro-batch at a time."""
    model = spec.model
    if not isinstance(model, ModelSpec):
        raise ValueError("only presets of the Transformer are predicted")
    batch = spec.batch // spec.micro_batches
    work = as_kind(WorkSpec, spec, batch=batch, phases="backward")
    return StepOperations(work, NetworkPart(batch=work.batch, passes=spec.micro_batches))
