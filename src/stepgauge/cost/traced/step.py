"""The step of a network that is known by its traced operators, predicted for one device and for a data
axis: each operator as a term, its gradients complete where autograd completed them.
"""

from stepgauge.cost.data_axis.buckets import Sending
from stepgauge.cost.data_axis.wrapper_host import unknown_host
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.host import launching
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices, library_of
from stepgauge.cost.step import modelled
from stepgauge.cost.streams.ledger import step_rows
from stepgauge.cost.streams.outcome import Outcome, exposed_ms, outcome, without_communication_ms
from stepgauge.cost.streams.program import DATA, Launching, Program, RankStep
from stepgauge.cost.traced.memory import traced_memory
from stepgauge.cost.traced.network import (
    TracedNetwork,
    TracedOperations,
    gathers_weights,
    require_traceable,
)
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import Layout, sent_bytes
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec, WorkSpec
from stepgauge.spec.steps import AnyStep, work_of
from stepgauge.spec.throughput import throughput
from stepgauge.spec.user_model import UserModel


def predict_traced(spec: AnyStep, traced: TracedNetwork, machine: CalibratedMachine) -> Record:
    """The modelled record of `bench step`, `bench data-parallel` or `bench layout`. Raises
    ValueError for what is not predicted, and for an operator that the hardware file does not have.
    """
    require_traceable(spec)
    layout, work = spec.parsed_layout, work_of(spec)
    operations = TracedOperations(spec, traced)
    prices = Prices(machine, layout, library_of(spec)).paced_by(operations)
    step = RankStep(operations, prices, _host(work, traced, machine, layout))
    program = step.program(
        data_axis(_sending(spec, layout), step), passes=spec.accumulation, phases=spec.phases
    )
    found = outcome(program, prices.contention)
    figures = _figures(spec, found, program)
    metrics = {name: Sample.exact(value, "ms") for name, value in figures.items()}
    if isinstance(spec, DataParallelSpec):
        how = operations.how
        travelling = how.activation if gathers_weights(layout) else how.weight
        nbytes = operations.num_parameters * travelling
        sent = sent_bytes(
            spec.wrapper, gradient_bytes=nbytes, weight_bytes=nbytes, ranks=spec.ranks
        )
        metrics["sent_bytes"] = Sample.exact(sent, "bytes")
    if not isinstance(spec.model, UserModel):  # of which tokens are not known
        metrics |= throughput([found.step_ms], tokens=spec.tokens_per_step)
    memory = traced_memory(operations, layout, accumulates=spec.accumulation > 1)
    rows = step_rows(operations, prices, found, passes=spec.accumulation)
    note = unknown_host(machine, work, layout)
    return modelled(spec, machine, metrics, rows, memory, late_us=found.late_us, note=note)


def _sending(spec: AnyStep, layout: Layout) -> Sending:
    if isinstance(spec, StepSpec):
        return Sending(wrapper="none", ranks=1)
    return Sending(
        wrapper=layout.wrapper, ranks=layout.data, bucket_mb=spec.bucket_mb,
        reduce_dtype=spec.reduce_dtype,
    )  # fmt: skip


def _figures(spec: AnyStep, found: Outcome, program: Program) -> dict[str, float]:
    """ms by the names of the command that measures the spec."""
    phases = dict(found.phases)
    if spec.accumulation > 1:
        both = phases.pop("forward") + phases.pop("backward")
        phases = {"forward_and_backward": both, **phases}
    figures = {f"{name}_ms": ms for name, ms in phases.items()}
    figures |= {"step_ms": found.step_ms, "device_ms": found.device_ms}
    if spec.ranks == 1:
        return figures
    without = without_communication_ms(program, DATA)
    exposed = exposed_ms(found.step_ms, without)
    if isinstance(spec, LayoutSpec):
        return {**figures, "without_data_ms": without, "data_exposed_ms": exposed}
    return {
        **figures,
        "communication_ms": found.communication.get(DATA, 0.0),
        "without_communication_ms": without,
        "exposed_ms": exposed,
    }


def _host(
    work: WorkSpec, traced: TracedNetwork, machine: CalibratedMachine, layout: Layout
) -> dict[str, Launching]:
    """Each phase's launches as so many blocks of the calibrated network's: all of it is one block,
    and what the calibrated network has outside of blocks comes first.
    """
    known = launching(work, machine, layout)
    return {
        phase: Launching(launch.block_us * traced.blocks.get(phase, 0.0), launch.us(0))
        for phase, launch in known.items()
    }
