"""Predicts a training step under any layout: the record that `bench layout` would measure.

Without a pipeline, the streams of one rank are simulated (cost/streams/program.py); with a pipeline,
its schedule (cost/pipeline/layout_step.py).
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.data_axis.wrapper_host import unknown_host
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.layout_parts import LayoutParts
from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.pipeline.layout_step import predict_pipelined, shortened_schedule
from stepgauge.cost.pipeline.step import span_rows
from stepgauge.cost.predicted import Predicted
from stepgauge.cost.rank import at_step_share, peak_of, peak_of_stages
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import modelled, rates
from stepgauge.cost.streams.ledger import step_rows
from stepgauge.cost.streams.outcome import exposed_ms
from stepgauge.cost.streams.passes import run_passes
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.pipeline import Schedule
from stepgauge.spec.plan.stages import describe_balance
from stepgauge.spec.record import Record, Sample

NOTHING_OVERLAPS = "overlap changes nothing here: each rank's piece of a message is too small"
ONE_MICRO_BATCH = (
    "the layout has no mN, so there is one micro-batch and the pipeline's ranks work in turn"
)


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
    plan = _schedule(spec, shortened)
    parts = _with_waits(LayoutParts.of(spec, machine, traced), plan)
    step = simulate_layout(parts, plan)
    figures = {
        **{f"{phase}_ms": ms for phase, ms in step.phases.items()},
        "step_ms": step.step_ms,
        **(_exposed(parts, plan, step) if exposed else {}),
    }
    metrics = {name: Sample.exact(value, "ms") for name, value in figures.items()}
    if step.timeline is not None:
        metrics["bubble"] = Sample.exact(step.bubble, "fraction of the step")
    sequences = spec.batch * spec.accumulation
    metrics |= rates(spec, machine, step.step_ms, sequences=sequences, ranks=spec.ranks)
    memory, note = _memory(parts, plan), _notes(parts)
    record = modelled(spec, machine, metrics, step.rows, memory, late_us=step.late_us, note=note)
    if step.timeline is None:
        return record
    tables = {**record.tables, "spans": span_rows(step.timeline)}
    blocks = [stage.blocks for stage in parts.stages]
    balance = describe_balance(blocks, "blocks", balance=spec.balance, times="predicted")
    return dataclasses.replace(
        record, tables=tables, note="; ".join(filter(None, (balance, record.note)))
    )


def _schedule(spec: LayoutSpec, shortened: bool) -> Schedule | None:
    """Returns the schedule to simulate; None without a pipeline."""
    whole = spec.schedule()
    return shortened_schedule(spec.parsed_layout) if whole and shortened else whole


def _with_waits(parts: LayoutParts, plan: Schedule | None) -> LayoutParts:
    """Returns the same step with prices of GPUs that wait for other stages, as they do in it."""
    if plan is None:
        return parts
    busy = simulate_layout(parts, plan).busy
    return dataclasses.replace(parts, prices=at_step_share(parts.prices, parts.stages, busy=busy))


def _without(parts: LayoutParts, axis: str, plan: Schedule | None) -> LayoutParts:
    """Returns the same step without communication on the axis, at its own clock: products are slower if a GPU
    does not wait for messages of a tensor or context axis.
    """
    others = parts.without(axis)
    if axis not in ("tensor", "context"):
        return others
    if plan is not None:
        return _with_waits(others, plan)
    return dataclasses.replace(others, prices=at_step_share(others.prices, others.stages))


def simulate_layout(parts: LayoutParts, plan: Schedule | None = None) -> Predicted:
    """Simulates the step. `plan` is the schedule of a pipeline, which may be shortened."""
    return predict_pipelined(parts, plan) if plan else _predict_single_stage(parts)


def _predict_single_stage(parts: LayoutParts) -> Predicted:
    accumulation, step = parts.spec.accumulation, parts.rank_step(0)
    simulated = run_passes(step, data_axis(parts.sending, step), count=accumulation)
    phases = dict(simulated.phases)
    if accumulation > 1:
        both = phases.pop("forward") + phases.pop("backward")
        phases = {"forward_and_backward": both, **phases}
    return Predicted(
        step_ms=simulated.step_ms,
        phases=phases,
        rows=step_rows(parts.stages[0], parts.prices, simulated, passes=accumulation),
        late_us=simulated.late_us,
    )


def _memory(parts: LayoutParts, plan: Schedule | None) -> Memory | None:
    layout, accumulates = parts.spec.parsed_layout, parts.spec.accumulation > 1
    if plan is None:
        return peak_of(parts.stages[0], layout, accumulates=accumulates)
    return peak_of_stages(parts.stages, layout, plan, accumulates=accumulates)


def _notes(parts: LayoutParts) -> str:
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


def _exposed(parts: LayoutParts, plan: Schedule | None, step: Predicted) -> dict[str, float]:
    """Returns the exposed communication of each axis, defined as in `bench layout`.

    For most axes it is the step minus the same step without the axis's communication. For a pipeline
    it is forward and backward minus the computation of the busiest rank.
    """
    figures = {}
    layout = parts.spec.parsed_layout
    reduced = ("data",) if layout.num_replicas > 1 else ()  # also with a context axis only
    for axis in dict.fromkeys((*layout.sizes, *reduced)):
        if axis != "pipeline":
            without_ms = simulate_layout(_without(parts, axis, plan), plan).step_ms
            figures[f"without_{axis}_ms"] = without_ms
            figures[f"{axis}_exposed_ms"] = exposed_ms(step.step_ms, without_ms)
    if step.timeline is not None:
        figures["busiest_rank_ms"] = step.busiest_ms
        figures["pipeline_exposed_ms"] = step.phases["forward_and_backward"] - step.busiest_ms
    return figures
