"""A data parallel step, predicted: the record that `bench data-parallel` would give.

The plans are those that the wrappers execute. A bucket is sent when its last gradient is there;
what computes beside a collective, and the collective, run slower meanwhile (cost/rates/contention.py).
"""

from stepgauge.cost.data_axis.buckets import Bucketed, Sending
from stepgauge.cost.data_axis.wrapper_host import unknown_host
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.rank import peak_of, rank_step_of
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import library_of
from stepgauge.cost.step import modelled, rates
from stepgauge.cost.streams.ledger import step_rows
from stepgauge.cost.streams.outcome import exposed_ms, outcome, without_communication_ms
from stepgauge.cost.streams.program import DATA, Operations, RankStep
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, sent_bytes
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.steps import work_of

UNITS = {"sent_bytes": "bytes", "buckets": "", "tail_bytes": "bytes"}


def predict_data_parallel(
    spec: DataParallelSpec, machine: CalibratedMachine, traced: TracedNetwork | None = None
) -> Record:
    """The modelled record. `traced`: of a network without formulas. Raises ValueError for what the
    cost model or the hardware file does not know.
    """
    work, layout = work_of(spec), spec.parsed_layout
    step = _rank_step(spec, machine, traced)
    sending = Sending(
        wrapper=spec.wrapper,
        ranks=spec.ranks,
        bucket_mb=spec.bucket_mb,
        reduce_dtype=spec.reduce_dtype,
        recorded=spec.cuda_graphs,
    )
    axis = data_axis(sending, step)
    program = step.program(axis)
    found = outcome(program, step.prices.contention)
    without = without_communication_ms(program, DATA)
    figures = {
        **{f"{phase}_ms": ms for phase, ms in found.phases.items()},
        "step_ms": found.step_ms,
        "communication_ms": found.communication.get(DATA, 0.0),
        "without_communication_ms": without,
        "exposed_ms": exposed_ms(found.step_ms, without),
        "sent_bytes": _sent_bytes(spec, step.operations),
    }
    if isinstance(axis, Bucketed):
        figures |= {"buckets": len(axis.buckets), "tail_bytes": axis.buckets[-1].bytes}
    metrics = {name: Sample.exact(v, UNITS.get(name, "ms")) for name, v in figures.items()}
    sequences = spec.batch * spec.ranks
    metrics |= rates(work, machine, found.step_ms, sequences=sequences, ranks=spec.ranks)
    rows = step_rows(step.operations, step.prices, found)
    note = unknown_host(machine, work, layout)
    memory = peak_of(step.operations, layout)
    return modelled(spec, machine, metrics, rows, memory, late_us=found.late_us, note=note)


def _rank_step(
    spec: DataParallelSpec, machine: CalibratedMachine, traced: TracedNetwork | None
) -> RankStep:
    layout = spec.parsed_layout
    return rank_step_of(
        work_of(spec),
        NetworkPart(batch=spec.batch, gathered=layout.gathers_weights),
        machine,
        layout=layout,
        traced=traced,
        library=library_of(spec),
        replayed=spec.cuda_graphs,
    )


def _sent_bytes(spec: DataParallelSpec, operations: Operations) -> float:
    how = operations.how
    travelling = how.activation if WRAPPERS[spec.wrapper].shards("weights") else how.weight
    narrowed = {"own": travelling}.get(spec.reduce_dtype, 2)
    numel = operations.num_parameters
    return sent_bytes(
        spec.wrapper,
        gradient_bytes=numel * min(narrowed, travelling),
        weight_bytes=numel * travelling,
        ranks=spec.ranks,
    )
