"""Predicts a data parallel step: the record that `bench data-parallel` would measure.

The plans are those that the wrappers execute. A bucket is sent when its last gradient is complete.
Computation and communication slow each other down while both run (cost/rates/contention.py).
"""

from stepgauge.cost.data_axis.buckets import REDUCE_BYTES, Bucketed, Sending
from stepgauge.cost.data_axis.wrapper_host import unknown_host
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.rank import peak_of, rank_step_of
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import library_of
from stepgauge.cost.step import modelled, rates
from stepgauge.cost.streams.ledger import step_rows
from stepgauge.cost.streams.outcome import (
    Outcome,
    exposed_ms,
    run_program,
    without_communication_ms,
)
from stepgauge.cost.streams.program import DATA, Operations
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, sent_bytes
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.steps import work_of

UNITS = {"sent_bytes": "bytes", "buckets": "", "tail_bytes": "bytes"}  # of other metrics: ms


def predict_data_parallel(
    spec: DataParallelSpec, machine: CalibratedMachine, traced: TracedNetwork | None = None
) -> Record:
    """Returns the modelled record.

    `traced` is the network if it has no formulas. Raises ValueError for what the cost model or the
    hardware file does not cover.
    """
    work, layout = work_of(spec), spec.parsed_layout
    step = rank_step_of(
        work,
        NetworkPart(batch=spec.batch, gathered=layout.gathers_weights),
        machine,
        layout=layout,
        traced=traced,
        library=library_of(spec),
        replayed=spec.cuda_graphs,
    )
    sending = Sending(
        wrapper=spec.wrapper,
        ranks=spec.ranks,
        bucket_mb=spec.bucket_mb,
        reduce_dtype=spec.reduce_dtype,
        recorded=spec.cuda_graphs,
    )
    axis = data_axis(sending, step)
    program = step.program(axis)
    without_ms = without_communication_ms(program, DATA, step.prices.contention)
    simulated = run_program(program, step.prices.contention)
    figures = _times(simulated, without_ms=without_ms)
    figures["sent_bytes"] = _sent_bytes(spec, step.operations)
    if isinstance(axis, Bucketed):
        figures |= {"buckets": len(axis.buckets), "tail_bytes": axis.buckets[-1].bytes}
    metrics = {name: Sample.exact(v, UNITS.get(name, "ms")) for name, v in figures.items()}
    sequences = spec.batch * spec.ranks
    metrics |= rates(work, machine, simulated.step_ms, sequences=sequences, ranks=spec.ranks)
    rows = step_rows(step.operations, step.prices, simulated)
    note = unknown_host(machine, work, layout, replayed=spec.cuda_graphs)
    memory = peak_of(step.operations, layout)
    return modelled(spec, machine, metrics, rows, memory, late_us=simulated.late_us, note=note)


def _times(simulated: Outcome, *, without_ms: float) -> dict[str, float]:
    """Returns ms by metric. `without_ms` is the same step without communication."""
    return {
        **{f"{phase}_ms": ms for phase, ms in simulated.phases.items()},
        "step_ms": simulated.step_ms,
        "communication_ms": simulated.communication.get(DATA, 0.0),
        "without_communication_ms": without_ms,
        "exposed_ms": exposed_ms(simulated.step_ms, without_ms),
    }


def _sent_bytes(spec: DataParallelSpec, operations: Operations) -> float:
    """Returns the bytes that a rank sends per step, by the counts of ring algorithms."""
    arithmetic, numel = operations.arithmetic, operations.num_parameters
    is_sharded = WRAPPERS[spec.wrapper].shards("weights")
    itemsize = arithmetic.activation_bytes if is_sharded else arithmetic.weight_bytes
    reduced = min(REDUCE_BYTES.get(spec.reduce_dtype, itemsize), itemsize)
    return sent_bytes(
        spec.wrapper,
        gradient_bytes=numel * reduced,
        weight_bytes=numel * itemsize,
        ranks=spec.ranks,
    )
